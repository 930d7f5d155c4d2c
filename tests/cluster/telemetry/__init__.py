"""Tests of cluster/telemetry."""
