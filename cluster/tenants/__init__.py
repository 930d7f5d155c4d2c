"""Who calls, what they may use, and whose turn it is. Knows no HTTP: every ingress uses the same objects."""
