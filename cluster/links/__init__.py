"""Transports of a link: in-process, TCP, and one that fails on purpose."""
