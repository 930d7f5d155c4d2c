"""`squadron batch`: a batch on the command line."""
