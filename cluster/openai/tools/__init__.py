"""Tool calls: parsers of the text that models write for them, by name, and grammars that force a call."""
