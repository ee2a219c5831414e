"""Fit session for ranks that communicate at every step and then hold identical weights.

With each exchange, every rank sends two flags: whether it requests a stop (`Stopping.wanted`), and
whether its data stream of unknown length ends with this step (`Stopping.stream_ends`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.liveness import AgreedError
from lightning_commfree.fit.contracts import EveryStep
from lightning_commfree.fit.session import FitSession
from lightning_commfree.resume.rank_files import copy_to_cpu

TAG = "order"
_NO_STEP = -1  # sent instead of an optimizer's index


class LockstepSession(FitSession[EveryStep]):
    """Fit session for algorithms that communicate at every step."""

    compares_weights = True

    @override
    def begin(self, resumed: bool) -> None:
        stopping = self._stopping
        self.between.follow_parameters()
        self.between.send_flags(lambda: stopping.wanted, lambda: stopping.stream_ends)
        super().begin(resumed)

    @override
    def batch_begins(self) -> None:
        # with manual optimization, the last batch of a stream may have no vote to carry the flag
        channel = self._world if self.clock.spans_batch else self._channels.within
        self._stopping.share_last_batch(channel)

    @contextmanager
    @override
    def training(self) -> Iterator[None]:
        with super().training():
            yield
            self._compare_order(None)

    @contextmanager
    @override
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        self._compare_order(optimizer)
        with super().step(optimizer):
            yield

    @override
    def _raw_step_begins(self, optimizer: Optimizer) -> None:
        if self._trainer.training:
            self._compare_order(optimizer)
        super()._raw_step_begins(optimizer)

    @override
    def sees(self, optimizer: Optimizer) -> None:
        if self._trainer.training and not self._knows(optimizer):
            raise RuntimeError(
                f"`{type(optimizer).__name__}` steps parameters of the module, but it is not in"
                " `trainer.optimizers`. Its steps are not exchanged, so the ranks would end with"
                " different weights. Return it from `configure_optimizers`."
            )

    def _knows(self, optimizer: Optimizer) -> bool:
        return any(optimizer is one for one in self._trainer.optimizers)

    @override
    def left_out(self) -> None:
        super().left_out()
        self._stopping.check_together(
            "An optimizer step was left out (`optimizer_step` did not call `optimizer.step`)",
            "Ranks that exchange something at every step must take the same steps. Agree on the"
            " condition first, for example with an all-reduce, or use `nonfinite='abstain'`.",
        )

    @override
    def after_step(self) -> None:
        if self.between.stream_ended:
            self._stopping.end_epoch()

    @override
    def validation_begins(self) -> None:
        super().validation_begins()
        self.between.average_buffers()

    @override
    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if self._ranks.interrupted:
            return read()
        # a checkpoint contains the means, but saving must not change how a fit trains
        averaged = self.between.averaged_buffers()
        buffers = [] if averaged is None else averaged.tensors()
        own = [buffer.clone() for buffer in buffers]
        self.between.average_buffers()
        state: dict[str, Any] = copy_to_cpu(read(), only=buffers)
        for buffer, values in zip(buffers, own, strict=True):
            buffer.copy_(values)
        return state

    @override
    def fit_ends(self) -> None:
        self.between.average_buffers()

    def _compare_order(self, optimizer: Optimizer | None) -> None:
        """With manual optimization, check that all ranks step the same optimizer next; collective.

        `optimizer` is the optimizer to be stepped next, or None if no step follows in this batch.

        Raises:
            AgreedError: the ranks are about to step different optimizers; raised on all ranks.
        """
        # with different orders, ranks would wait for each other until the timeout
        world, trainer = self._world, self._trainer
        if not self.clock.spans_batch or world.size == 1:
            return
        index = _NO_STEP
        if optimizer is not None:
            index = [one is optimizer for one in trainer.optimizers].index(True)
        mine = torch.tensor([trainer.fit_loop.total_batch_idx, index], device=world.device)
        found = world.all_gather(mine, TAG).wait().tolist()
        if any(one != found[0] for one in found):
            orders = [
                f"rank {rank} "
                + ("takes no further step in" if i == _NO_STEP else f"steps optimizer {i} in")
                + f" batch {at}"
                for rank, (at, i) in enumerate(found)
            ]
            raise AgreedError(
                f"The ranks are stepping their optimizers in different orders: {', '.join(orders)}."
                " With manual optimization, `training_step` must step the same optimizers on the"
                " same batches on all ranks, in the same order."
            )
