"""The ground floor: groups of ranks, what travels between them, and what it costs in bytes.

Torch only; it knows no paper.
"""
