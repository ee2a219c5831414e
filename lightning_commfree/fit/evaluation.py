"""Check that ranks that share a model have the same number of validation, test and predict batches.

If each rank of a replica holds a shard of the model, the ranks compute every batch together. A rank
with more batches than the others would wait for them until the timeout. Lightning's own sampler for
`fit`, `validate` and `test` gives every rank the same number.
"""

from __future__ import annotations

import math
from typing import Any

from lightning_commfree.fit.contracts import Layout
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.host import TrainerFn, pl
from lightning_commfree.lightning_internals import Patches


def check_evaluation(trainer: pl.Trainer, ranks: Ranks, inside: Layout, patches: Patches) -> None:
    """Patch the loop of the running Trainer method to check its loaders' lengths.

    It checks them whenever it has set them up. In a `fit`, it is the validation loop, for the first
    time before the sanity check. The check is collective and raises a `ValueError` on all ranks.
    """
    loops: dict[Any, tuple[Any, str]] = {
        TrainerFn.FITTING: (trainer.fit_loop.epoch_loop.val_loop, "val"),
        TrainerFn.VALIDATING: (trainer.validate_loop, "val"),
        TrainerFn.TESTING: (trainer.test_loop, "test"),
        TrainerFn.PREDICTING: (trainer.predict_loop, "predict"),
    }
    loop, stage = loops[trainer.state.fn]
    set_up = loop.setup_data

    def set_up_and_check() -> None:
        """Set up the loop's loaders; if ranks share a model, compare their lengths (collective)."""
        set_up()
        if inside.states is not None and inside.states.shares_model:
            for i, batches in enumerate(getattr(trainer, f"num_{stage}_batches")):
                _check_loader(ranks, inside.size, f"{stage}_dataloaders[{i}]", stage, batches)

    # not `on_run_start`, which a rank without any batch does not call
    patches.put(loop, "setup_data", set_up_and_check)


def _check_loader(
    ranks: Ranks, replica_size: int, loader_name: str, stage: str, batches: float
) -> None:
    """Raise a `ValueError` if ranks of a replica have unequal numbers of batches; collective."""
    counts = ranks.all_values(-1 if math.isinf(batches) else int(batches))
    if -1 in counts:
        raise ValueError(
            "The ranks of a replica share a model, so they must evaluate the same number of"
            f" batches, but `{loader_name}` has no length on rank {counts.index(-1)}. Set"
            f" `limit_{stage}_batches` to a number of batches that every rank has."
        )
    for first in range(0, len(counts), replica_size):
        replica = counts[first : first + replica_size]
        least, most = min(replica), max(replica)
        if least < most:
            raise ValueError(
                "The ranks of a replica share a model, so they must evaluate the same number of"
                f" batches, but `{loader_name}` has {least} on rank {first + replica.index(least)}"
                f" and {most} on rank {first + replica.index(most)}. Give every rank of a replica"
                " the same number of batches, as Lightning's own sampler does"
                + (
                    ", or predict on a single device, from a checkpoint."
                    if stage == "predict"
                    else f", or set `limit_{stage}_batches={least}`."
                )
            )
