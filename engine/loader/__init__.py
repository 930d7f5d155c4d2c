"""Checkpoints on disk: which tensors they hold, how they are read and checked, and how a model is named by them."""
