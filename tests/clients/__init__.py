"""Clients against our server: `python -m tests.clients`."""
