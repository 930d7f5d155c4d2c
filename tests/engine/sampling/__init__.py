"""Tests of engine/sampling."""
