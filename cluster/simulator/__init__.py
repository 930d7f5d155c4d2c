"""A whole cluster in virtual time: the code that serves, a stub engine, and faults. No serving code uses it."""
