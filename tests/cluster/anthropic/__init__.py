"""Tests of cluster/anthropic."""
