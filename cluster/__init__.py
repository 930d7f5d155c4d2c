"""On Ray: routers, replicas, the APIs, batches, admission, metrics."""
