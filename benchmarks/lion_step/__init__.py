"""Cost of a Distributed Lion step without communication. `operations` are the timed parts."""
