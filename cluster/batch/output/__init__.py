"""Outputs of a batch: each row once, in a file that is whole as soon as it is there, and a manifest of it."""
