"""The hot paths as Pallas kernels for NVIDIA GPUs: loads, stores and grids, no mathematics."""
