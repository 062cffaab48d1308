"""Structured output: what a caller asks for becomes a grammar, and that a constraint."""
