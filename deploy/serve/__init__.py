"""`squadron serve`: from a configuration to an address that answers, and back to an empty machine."""
