"""Exact resume: what one rank knows beside a checkpoint, the place in the data, random numbers.

It knows no algorithm and imports no wing. Files and their parts are `checkpoint`'s; private names
of Lightning come from `lightning_internals`.
"""
