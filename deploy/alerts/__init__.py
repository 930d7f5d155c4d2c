"""Alerts for Prometheus: `squadron.rules.yaml` is written from a table of them."""
