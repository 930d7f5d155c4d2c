"""Tests of cluster/router."""
