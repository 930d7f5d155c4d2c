"""Decoders: one file per family says which layers it has and what its weights are called."""
