"""What models are composed of: each layer declares its weights, its quantisation and its cache."""
