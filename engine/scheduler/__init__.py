"""Which sequences run in a step, with how many tokens, and what becomes of them afterwards."""
