"""Tests of deploy/serve."""
