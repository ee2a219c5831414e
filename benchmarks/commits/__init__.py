"""Compare the step time of two checkouts. `__main__` alternates between them, `job` trains."""
