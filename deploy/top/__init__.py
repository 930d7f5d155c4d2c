"""`squadron top`: what an app does right now, from two looks at its /metrics."""
