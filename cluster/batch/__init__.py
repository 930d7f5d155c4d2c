"""Batch inference: rows in, each exactly once out, whatever is killed meanwhile. Same replicas, no HTTP."""
