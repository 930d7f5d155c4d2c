"""How many replicas a model should have: figures, a pure policy, and what Serve is told."""
