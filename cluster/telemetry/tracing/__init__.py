"""Traces of requests from ingress to engine phases.

Only `provider`, `call_trace` and `engine_spans` import opentelemetry, and only `start` imports them, where tracing is
on.
"""
