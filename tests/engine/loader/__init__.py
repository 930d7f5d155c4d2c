"""Tests of engine/loader."""
