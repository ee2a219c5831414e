"""Step time and traffic of Distributed Lion over slow links, on two and on four nodes.

Uses `benchmarks.bandwidth` with other rows.
"""
