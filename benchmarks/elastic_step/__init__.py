"""Step time of elastic replicas in a job that nobody joins or leaves."""
