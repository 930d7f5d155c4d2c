"""What stands between clients and routers: Ray Serve's proxy, or HAProxy, and reports of routers' deaths."""
