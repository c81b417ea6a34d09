"""Times of vLLM's own Triton functions on the rows of benchmarks/gpu."""
