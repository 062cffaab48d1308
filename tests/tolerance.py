"""How close is close enough: every bound, in one place. Loosening one needs a reason."""

# Our reference against transformers, absolute; the logits' standard deviation is about 4.
LOGITS_OF_TRANSFORMERS = 5e-4
HIDDEN_OF_TRANSFORMERS = 5e-4

# The reference with a cache against itself in one go: only the order of float32 sums differs.
LOGITS_INCREMENTAL = 5e-4
