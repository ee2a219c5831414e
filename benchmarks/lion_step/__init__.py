"""What does a step of Distributed Lion cost without communication?

`operations` are what is timed.
"""
