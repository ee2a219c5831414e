"""Exact resume: what one rank knows beside a checkpoint, the place in the data, random numbers.

It knows no algorithm and imports no wing. Private names of Lightning come from
`lightning_internals`.
"""
