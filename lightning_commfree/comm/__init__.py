"""Channels between ranks, the traffic ledger, bit packing and failure detection.

Depends on torch only and knows nothing of the training algorithms.
"""
