"""`squadron doctor`: whether this machine is fit to serve, and what to do where it is not."""
