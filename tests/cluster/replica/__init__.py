"""Tests of cluster/replica."""
