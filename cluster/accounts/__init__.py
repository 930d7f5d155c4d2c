"""What requests waited for and what they used, from the events of an engine and of a router."""
