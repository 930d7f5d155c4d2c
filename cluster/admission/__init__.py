"""Keys, tenants, quotas, deadlines, and the queue in front of the replicas."""
