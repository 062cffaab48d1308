"""Whether this machine computes correctly, and how fast."""
