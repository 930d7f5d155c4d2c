"""Tensor-parallel primitives: groups, collectives, sharded layers, the driver-to-workers channel.

Knows torch and nothing above it.
"""
