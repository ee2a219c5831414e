"""Checkpoints and exact resume, for any algorithm.

exact            contents of a checkpoint; saving it, and resuming from it
rank_files       one file per rank, beside the checkpoint
data_position    loaders, RNG state, partially accumulated gradients
loops            restoring Lightning's loops to their state when the checkpoint was saved
files            atomic writes, and verification of checksums when reading
folders          checkpoints of large sharded models, as folders
copies           sending files to ranks that do not share a disk with the rank that saved them
checkpoint_io    Lightning's checkpoint plugins
"""
