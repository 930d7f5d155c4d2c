"""The `squadron` command: its flags, and what all commands share."""
