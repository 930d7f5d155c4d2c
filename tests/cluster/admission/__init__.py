"""Tests of cluster/admission."""
