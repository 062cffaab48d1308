"""Reference implementation of Gemma 4 in numpy, written from the specification of the model."""
