"""Tests of deploy/cli."""
