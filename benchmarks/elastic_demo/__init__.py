"""Elastic replicas that are killed, drained and started again: `make elastic-demo`."""
