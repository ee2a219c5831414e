"""Checkpoints and exact resume, for any algorithm.

contents         every entry of a save: who makes it, and who restores it
exact            the steps of a save and of a resume
rank_files       one file per rank, beside the checkpoint
data_position    loaders, RNG state, partially accumulated gradients
loader_parts     samplers, data sets and generators, and which of them a resume knows
loops            restoring Lightning's loops to their state when the checkpoint was saved
own_tensors      untrained tensors that differ between ranks
changes          settings that hooks change during a fit
hook_changes     what `on_load_checkpoint` hooks change in a checkpoint, which is kept
optimizers       loading optimizer states without rounding them
files            atomic writes, and verification of checksums when reading
folders          checkpoints of large sharded models, as folders
copies           sending files to ranks that do not share a disk with the rank that saved them
checkpoint_io    Lightning's checkpoint plugins
"""
