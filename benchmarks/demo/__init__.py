"""The loss of `make demo`, compared with DDP on the same tokens."""
