"""Routers, replicas and their front ends, without Ray."""
