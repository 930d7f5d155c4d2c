"""What Squadron measures: one table of all figures, who makes them, and how they get to Prometheus."""
