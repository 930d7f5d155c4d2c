"""What is told of requests and steps: metrics, traces, logs, and why a request waited."""
