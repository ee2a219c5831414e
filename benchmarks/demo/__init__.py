"""What does `make demo` reach, beside DDP with the same tokens?"""
