"""What the engine tells of its steps: who used it, what requests waited for, how long things took."""
