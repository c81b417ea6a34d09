"""Times of FlashInfer's sampling kernels on the rows of benchmarks/gpu."""
