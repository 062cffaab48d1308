"""GGUF model files: readers, writers, sources and stores."""
