"""Tests of engine/attention."""
