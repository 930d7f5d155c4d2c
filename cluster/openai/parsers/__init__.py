"""What models write, read back: tool calls in the formats of model families, thinking, and forced calls."""
