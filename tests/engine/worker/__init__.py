"""Tests of engine/worker."""
