"""Checkpoints and exact resume, for any algorithm.

exact            contents of a checkpoint; saving, and resuming from it
rank_files       one file per rank, beside the checkpoint
data_position    loaders, RNG state, partly accumulated gradients
loops            Lightning's loops, restored to their state when the checkpoint was saved
files            atomic writes, and checksums when reading
folders          checkpoints of large sharded models, as folders
copies           files sent to ranks that do not share a disk with the rank that saved
checkpoint_io    Lightning's checkpoint plugins
"""
