"""What is reported of requests and steps: metrics, traces, logs."""
