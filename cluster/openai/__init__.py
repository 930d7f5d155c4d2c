"""The OpenAI-compatible front end: one validator, token text, SSE and JSON answers, as an ASGI app."""
