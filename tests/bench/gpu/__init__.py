"""`python -m tests.bench.gpu`: checks and measures the engine on one GPU, with what a bare GPU machine has."""
