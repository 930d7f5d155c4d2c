"""Client libraries against our server: `python -m tests.clients`."""
