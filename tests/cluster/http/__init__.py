"""Tests of cluster/http."""
