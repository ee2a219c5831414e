"""Cost of a sync by number of replicas, and memory of the outer state."""
