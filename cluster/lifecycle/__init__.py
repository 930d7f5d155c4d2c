"""The life of an app: starts and their failures, updates, rollback, autoscaling."""
