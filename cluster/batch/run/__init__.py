"""One batch run: which rows run when, on what replicas, and at what cost."""
