"""The paged key-value cache: who holds which block, what blocks are named by, and how many there are."""
