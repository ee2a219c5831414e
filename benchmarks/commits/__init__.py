"""Is a training step as fast as at another commit? `__main__` alternates, `job` trains."""
