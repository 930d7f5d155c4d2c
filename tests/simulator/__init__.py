"""Replicas without a model: the real scheduler, block manager and reports, with step times from a formula.

In virtual time a laptop runs a hundred replicas, and the same seed gives the same figures.
"""
