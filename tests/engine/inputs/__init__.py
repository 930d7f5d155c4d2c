"""Tests of engine/inputs."""
