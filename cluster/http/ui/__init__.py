"""The page at `/ui` to try the served model on: one static file, and the headers it is served with."""
