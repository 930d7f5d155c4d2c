"""What computes a step on each rank: executors, the runner, CUDA graphs, sleep."""
