"""Correctness and cost on a GPU: one command, one page."""
