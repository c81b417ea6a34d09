"""The pair of models in the package, measured on held-out text."""
