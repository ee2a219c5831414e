"""Channels between ranks, the traffic ledger, bit packing and failure detection.

This package depends only on torch, not on the training algorithms.
"""
