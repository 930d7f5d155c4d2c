"""`squadron plan`: what a model needs of GPUs, and what they can give at best."""
