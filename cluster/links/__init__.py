"""Transports of a link: in-process, gRPC, and one that fails on purpose."""
