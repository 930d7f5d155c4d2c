"""Tests of engine/kernels."""
