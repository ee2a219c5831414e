"""What does Streaming DiLoCo cost in loss, beside DDP with the same tokens?

`grid` says which runs there are.
"""
