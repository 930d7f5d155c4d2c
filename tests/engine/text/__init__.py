"""Tests of engine/text."""
