"""The forward and backward pass of training: layers, attention, experts, embeddings, products."""
