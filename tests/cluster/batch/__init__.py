"""Tests of cluster/batch."""
