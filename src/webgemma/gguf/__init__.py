"""Reading and writing GGUF, the file format of the models."""
