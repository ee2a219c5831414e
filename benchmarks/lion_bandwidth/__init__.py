"""How long does a step of Distributed Lion take over slow links, and what does it send?

The machinery of `benchmarks.bandwidth` with other rows, on two and on four nodes.
"""
