"""Python functions that a model calls."""
