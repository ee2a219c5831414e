"""Checkpoints and exact resume, for any algorithm.

A checkpoint is Lightning's own, with full tensors, plus one entry: the algorithm's state that all
replicas share, saved once, and rank 0's own state; every other rank writes its own state into a
file beside it.

    exact            what a checkpoint contains; saving, and resuming from it
    rank_files       the files of single ranks
    own_tensors      untrained tensors that can differ between ranks
    data_position    loaders, random numbers, half-accumulated gradients
    loops            Lightning's loops at the moment of the save
    files            files that are complete or absent, and checked when they are read
    folders          checkpoints of large sharded models that are folders
    checkpoint_io    Lightning's plugins that read and write checkpoints

No module here knows an algorithm; private names of Lightning come from `lightning_internals`.
"""
