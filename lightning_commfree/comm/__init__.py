"""Channels between ranks, the traffic ledger, bit packing and failure detection.

Depends only on torch, and not on the training algorithms.
"""
