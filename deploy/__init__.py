"""What people run and ship: the command line, the chart's values, dashboards, the image, the demo model."""
