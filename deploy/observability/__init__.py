"""Prometheus alerts and Grafana dashboards: tables in Python, from which the files that ship are written."""
