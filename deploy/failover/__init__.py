"""`squadron demo-failover`: kills replicas under streams, and shows whether any stream noticed."""
