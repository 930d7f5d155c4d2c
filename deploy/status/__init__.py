"""`squadron status`: what a server says of itself, read over HTTP alone."""
