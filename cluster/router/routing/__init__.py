"""Which replica runs a request: policies, what is in the replicas' prefix caches, the names of a prompt's blocks."""
