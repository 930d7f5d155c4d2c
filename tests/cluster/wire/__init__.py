"""Tests of cluster/wire."""
