"""Tests of cluster/ingress."""
