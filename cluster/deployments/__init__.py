"""What Ray Serve runs: the router, the replica, and the runner of a server's batches."""
