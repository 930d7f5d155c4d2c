"""The gRPC interface: the same calls as over HTTP, served beside it."""
