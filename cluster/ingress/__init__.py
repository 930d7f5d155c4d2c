"""What stands between clients and routers: Ray Serve's proxy or gateways, and reports of routers' deaths."""
