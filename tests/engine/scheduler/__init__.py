"""Tests of engine/scheduler."""
