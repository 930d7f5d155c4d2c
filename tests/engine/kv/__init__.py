"""Tests of engine/kv."""
