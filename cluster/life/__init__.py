"""The life of an app: updates, starts and their failures, and what is told of them."""
