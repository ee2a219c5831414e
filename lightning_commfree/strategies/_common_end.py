"""All ranks end a fit after the same step, whichever rank's data or will ends first.

Who leaves alone would be waited for. So a rank says in a step's exchange that its part ends with
that step: its epoch's data are used up, or it wants to stop. If that holds for some ranks and not
for others, all of them learn so from that exchange, take the step, and end the fit after it, with
equal weights. If it holds for all, an epoch or the fit is over, and nothing is said or sent.

`trainer.should_stop` is set later, in `on_train_batch_end` or after a validation, when the step's
exchange is over. A rank that has set it asks the others whether they stop at the same place
(`comm.crossings`). If they do, nothing changes; if not, it trains for one step more and says so in
that one.

What nobody can foresee is not covered: `dataloader_iter` in `training_step`, a loader that yields
fewer batches than its length, `on_train_batch_start` that returns -1 on some ranks.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.progress import _ProcessedTracker

from lightning_commfree.comm.channel import Channel
from lightning_commfree.lightning_internals import Patches

TAG = "end"
GOES_ON, DATA, WILL, MAX_STEPS = range(4)
WHY = {
    DATA: "The data of {ranks} ended",
    WILL: "{ranks} wanted to stop (`trainer.should_stop`)",
    MAX_STEPS: "{ranks} reached `max_steps`",
}


class CommonEnd:
    """Watches one Trainer's fit, from `install` to `remove`."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._trainer: pl.Trainer | None = None
        self._wants_to_stop = False  # it would have, at a crossing that others passed
        self._agreed = False

    def install(self, trainer: pl.Trainer, channel: Channel) -> None:
        """Patch the ends of Lightning's two training loops; `channel` is over the world."""
        self.remove()
        self._wants_to_stop = self._agreed = False
        if trainer.world_size == 1:
            return
        self._trainer, self._channel = trainer, channel
        self._crossings = channel.crossings()
        loop = trainer.fit_loop
        end_of_batch, end_of_epoch = loop.epoch_loop.on_advance_end, loop.on_advance_end

        def end_batch(*args: Any, **kwargs: Any) -> None:
            self._cross()  # before a validation
            end_of_batch(*args, **kwargs)
            self._cross()

        def end_epoch() -> None:
            end_of_epoch()
            self._cross()

        self._patches.put(loop.epoch_loop, "on_advance_end", end_batch)
        self._patches.put(loop, "on_advance_end", end_epoch)

    def remove(self) -> None:
        """Give Lightning its own methods back."""
        self._patches.remove()
        self._trainer = None

    def why(self) -> int:
        """Return by what this rank's epoch or fit ends with the optimizer step that runs.

        A number below 4; 0 where it does not.
        """
        trainer = self._trainer
        if trainer is None:
            return GOES_ON
        loop = trainer.fit_loop
        if loop.epoch_loop._num_ready_batches_reached():
            return DATA
        if trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps:
            return MAX_STEPS
        wants = self._wants_to_stop or (trainer.should_stop and loop._can_stop_early)
        return WILL if wants else GOES_ON

    def agree(self) -> None:
        """End the fit after the step that runs, in whose exchange the ranks said different things.

        If it ends on all of them, some by their data and some by `max_steps`, say, that needs no
        words, but they must do so alike: at the end of its data a rank validates.

        Raises:
            RuntimeError: `min_epochs` or `min_steps` forbids to end here; on all ranks alike.
        """
        trainer = self._trainer
        assert trainer is not None, "a single rank has nobody to part from"
        mine = torch.tensor([self.why()], device=self._channel.device)
        reasons = self._channel.all_gather(mine, TAG).wait().flatten().tolist()
        said = "; ".join(
            why.format(ranks=named_ranks([r for r, reason in enumerate(reasons) if reason == code]))
            for code, why in WHY.items()
            if code in reasons
        )
        others = [rank for rank, reason in enumerate(reasons) if reason == GOES_ON]
        if not others:
            self._agreed, trainer.should_stop = True, True
            return
        step = trainer.global_step + 1
        said = f"{said} after step {step}, and {named_ranks(others)} would have gone on."
        loop = trainer.fit_loop
        epochs, steps = loop.min_epochs or 0, loop.min_steps or 0
        epoch = cast(_ProcessedTracker, loop.epoch_progress.current)
        if epoch.processed < epochs or step < steps:
            raise RuntimeError(
                f"{said} The fit cannot end here, for `min_epochs={loop.min_epochs}` and"
                f" `min_steps={loop.min_steps}`. Give all ranks equally many batches, as with"
                " `limit_train_batches`, or leave these out."
            )
        warnings.warn(
            f"{said} All ranks end the fit after this step, with the same weights. For a fit that"
            " goes on, give all ranks equally many batches, as with `limit_train_batches`, and let"
            " all of them decide alike when to stop.",
            stacklevel=2,
        )
        self._agreed, trainer.should_stop = True, True

    # -- inside

    def _cross(self) -> None:
        """Stop here if all do, else on with it; between two steps."""
        trainer = self._trainer
        if trainer is None or self._agreed:
            return
        if not (trainer.should_stop and trainer.fit_loop._can_stop_early):
            self._crossings.pass_by()
        elif self._crossings.all_stay():
            self._agreed = True
        else:
            self._wants_to_stop, trainer.should_stop = True, False


def named_ranks(ranks: list[int]) -> str:
    """Return them for a message: "rank 1", "ranks 1, 2"."""
    names = ", ".join(map(str, ranks[:20])) + (" and others" if len(ranks) > 20 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}"
