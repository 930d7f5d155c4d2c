"""Reasoning parsers: what a model thought, apart from what it says."""
