"""Tests of engine/models."""
