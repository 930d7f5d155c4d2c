"""What stands between clients and routers: Ray Serve's proxy, or HAProxy, and how a router's death is told there."""
