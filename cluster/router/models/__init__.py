"""The models of one app: what a router holds of each, and which one a request means."""
