"""What routers and replicas say to each other, and the streams that carry it."""
