"""Package squadron.v1: `inference.proto` and what `python -m tests.grpc_codegen` makes of it."""
