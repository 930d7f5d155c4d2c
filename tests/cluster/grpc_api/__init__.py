"""Tests of cluster/grpc_api."""
