"""Tests of cluster/lifecycle."""
