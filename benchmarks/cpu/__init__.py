"""Times on a CPU, next to what JAX offers."""
