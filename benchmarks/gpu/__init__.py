"""Times on an NVIDIA GPU, next to what JAX offers."""
