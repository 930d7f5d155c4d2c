"""Tests of cluster/accounts."""
