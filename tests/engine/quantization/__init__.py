"""Tests of engine/quantization."""
