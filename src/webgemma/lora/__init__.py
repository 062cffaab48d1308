"""Low-rank adapters: their files, their data, their training."""
