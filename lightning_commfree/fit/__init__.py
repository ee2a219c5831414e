"""From Lightning's hooks to one fit, for any algorithm and layout.

contracts       what an algorithm between replicas and a layout inside a replica must implement
fit             what layouts and checks know of the Trainer's run
base            the strategies' base class: Lightning's hooks, delegated
session         what happens around every step, for all algorithms
local_weights   for algorithms whose replicas train apart: shared weights for validation and saves
stopping        all ranks stop, and end their epochs, after the same step
signals         SIGTERM and SLURM's signals
clock           what counts as a step
ranks           ranks, channels and the job's key-value store
evaluation      validation of sharded models
drift           comparing the ranks' weights
checks          refusals of what a strategy cannot do
unwrappable     `trainer.model`, for code that expects DDP's wrapper
"""
