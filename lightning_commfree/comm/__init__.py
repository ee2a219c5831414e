"""Communication layer: collectives, traffic accounting, bit packing and failure detection.

This package does not depend on Lightning or on the training algorithms.
"""
