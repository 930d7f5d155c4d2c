"""Files and batches that clients leave with a server: what they are, where they are kept, what may become of them."""
