"""Tests of cluster/openai."""
