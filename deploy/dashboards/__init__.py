"""Two Grafana dashboards, each a table of panels: `service.json` and `engine.json` are written from them."""
