"""Weights in eight bits: what flag and checkpoint come to, and the layers that hold them."""
