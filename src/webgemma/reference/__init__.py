"""The whole model in plain numpy, from its definition: to learn from, and to judge by."""
