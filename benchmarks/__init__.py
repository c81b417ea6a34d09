"""Scripts that measure specjax; README.md says how to run and read each."""
