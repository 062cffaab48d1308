"""Gemma 4 as files describe it: configuration, tensors, and (with a device) the forward pass."""
