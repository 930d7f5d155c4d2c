"""Tests of engine/telemetry."""
