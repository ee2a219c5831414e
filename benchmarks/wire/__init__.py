"""What do the wire formats lose, and what do they cost in time?

`errors` measures what they lose.
"""
