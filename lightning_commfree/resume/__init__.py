"""Checkpoints and exact resume, for any algorithm.

exact            contents of a checkpoint; saving it, and resuming from it
rank_files       one file per rank, beside the checkpoint
data_position    loaders, RNG state, partially accumulated gradients
loader_parts     samplers, data sets and generators, and which of them a resume knows
loops            restoring Lightning's loops to their state when the checkpoint was saved
changes          settings that hooks change during a fit
optimizers       loading optimizer states without rounding them
files            atomic writes, and verification of checksums when reading
folders          checkpoints of large sharded models, as folders
copies           sending files to ranks that do not share a disk with the rank that saved them
checkpoint_io    Lightning's checkpoint plugins
"""
