"""What computes: the engines on the GPU and the CPU, and a conversation's session."""
