"""Structured output: what a request's tokens must match."""
