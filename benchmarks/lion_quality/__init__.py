"""What does the vote cost in loss, beside Lion and AdamW on the same tokens?

`grid` says which runs there are, `runs` makes one, by the workers that `played` plays in one
process; `page` writes it up.
"""
