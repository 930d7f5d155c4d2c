"""Protocol buffers of the gRPC interface, by package."""
