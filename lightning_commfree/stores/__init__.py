"""Stores: keys and bytes in a folder, a TCPStore or a bucket that all replicas can reach.

This package does not depend on Lightning, on the training algorithms or on the rest of the library.
"""
