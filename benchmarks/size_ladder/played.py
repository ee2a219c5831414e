"""Train M replicas of Streaming DiLoCo in one process, bit for bit like M processes.

The replicas are `StreamingDiLoCo` objects of the library; only the network is replaced, by a board
on which they leave messages for each other. So every setting of the library works here, and a run
needs one core and waits for nobody.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.common.pretraining import Config, batches, composed, take_steps
from benchmarks.size_ladder.cells import Cell
from benchmarks.size_ladder.outer import RadialDiLoCo
from benchmarks.size_ladder.peers import METHODS, loss_of
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import DiLoCoSettings, StreamingDiLoCo, split_into_fragments
from lightning_commfree.diloco.transport import FixedTransport
from recipes.training.evaluation import token_loss
from recipes.training.pretraining import build_data, build_module

TIMEOUT_S = 120.0  # for a message of another replica
SAVE_EVERY_S = 120.0


class Board:
    """Messages of M replicas to each other, by collective, in place of a network."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._launched = [0] * size  # collectives by replica
        self._sent: dict[int, dict[int, Tensor]] = {}  # rows by collective and sender
        self._received: dict[int, int] = {}
        self._changed = threading.Condition()

    def send(self, rank: int, rows: Tensor) -> int:
        """Leave a row for every replica, shape (M, *S); return the number of the collective."""
        with self._changed:
            number = self._launched[rank]
            self._launched[rank] += 1
            self._sent.setdefault(number, {})[rank] = rows
            self._changed.notify_all()
        return number

    def receive(self, number: int, rank: int) -> Tensor:
        """Wait for all replicas; return their rows for `rank`, shape (M, *S)."""
        with self._changed:
            rows = self._sent[number]
            if not self._changed.wait_for(lambda: len(rows) == self.size, TIMEOUT_S):
                raise RuntimeError(f"collective {number}: only replicas {sorted(rows)} take part")
            received = torch.stack([rows[sender][rank] for sender in range(self.size)])
            self._received[number] = self._received.get(number, 0) + 1
            if self._received[number] == self.size:
                del self._sent[number], self._received[number]
        return received


class PlayedChannel(Channel):
    """A channel between replicas of one process.

    Args:
        board: shared by the replicas.
        rank: of this replica.
    """

    def __init__(self, board: Board, rank: int) -> None:
        group: Any = board if board.size > 1 else None
        super().__init__(range(board.size), rank, Ledger(), group)
        self._board = board

    @override
    def _start_exchange(self, rows: Tensor, tag: str) -> Pending[Tensor]:
        number = self._board.send(self.rank, rows)
        return Pending(lambda: self._board.receive(number, self.rank))


class PlayedReplicas:
    """`StreamingDiLoCo` on M replicas.

    Args:
        modules: one per replica, with equal weights.
        settings: of `StreamingDiLoCo`, with one rank per replica and an overlap of at least a step:
            the first replica would otherwise wait for the others, which take their step later.
        algorithm: of each replica.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        settings: DiLoCoSettings,
        algorithm: type[StreamingDiLoCo] = StreamingDiLoCo,
    ) -> None:
        assert settings.replica_size == 1, "one module per replica"
        assert settings.overlap_steps > 0 or len(modules) == 1, "an overlap of 0 would block"
        fragments = split_into_fragments(
            modules[0], settings.num_fragments, settings.fragment_pattern
        )
        board = Board(len(modules))
        self.replicas = [
            algorithm(module, fragments, settings, FixedTransport(PlayedChannel(board, rank)))
            for rank, module in enumerate(modules)
        ]

    def after_steps(self) -> None:
        """Count an inner step of all replicas; launch and land the fragments that are due."""
        for replica in self.replicas:
            replica.after_step()

    def finish(self) -> None:
        """End the fit: all replicas take the mean of the local weights."""
        self._together(StreamingDiLoCo.finish)

    def outer_round(self) -> None:
        """Land what is in flight, then take an outer step on every fragment and show the result.

        This is how a fit ended in earlier versions.
        """
        self._together(_outer_round)

    def state_dict(self) -> list[Any]:
        """Return the states of all replicas; tensors are not copied."""
        return [replica.state_dict() for replica in self.replicas]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        """Continue from saved states."""
        for replica, state in zip(self.replicas, states, strict=True):
            replica.load_state_dict(*state)

    def close(self) -> None:
        """Stop the replicas' threads."""
        for replica in self.replicas:
            replica.close()

    def _together(self, method: Callable[[StreamingDiLoCo], object]) -> None:
        """Call a blocking method of all replicas, each on its own thread."""
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            list(pool.map(method, self.replicas))


@torch.no_grad()
def _outer_round(replica: StreamingDiLoCo) -> None:
    for p in replica.in_flight:
        replica.land(p)
    for p, fragment in enumerate(replica.fragments):
        replica.launch(p)
        replica.land(p)
        fragment.show()


class Stopped(Exception):  # noqa: N818 - not an error: the run continues in a later call
    """The time is up; the run's checkpoint has been saved."""


class Run:
    """One training run that can be stopped and continued, bit for bit.

    Args:
        config: of `recipes.pretrain`, with one device per replica and the global batch. Of the
            Trainer, only `max_steps` and `gradient_clip_val` are used.
        replicas: M, or 0 for DDP, whose ranks together take the gradient of the global batch.
        checkpoint: file for the state of an unfinished run.
        algorithm: of the replicas.
    """

    def __init__(
        self,
        config: Config,
        replicas: int,
        checkpoint: Path,
        algorithm: type[StreamingDiLoCo] = StreamingDiLoCo,
    ) -> None:
        pl.seed_everything(config["seed"], workers=True, verbose=False)
        self._trainer, self._checkpoint = config["trainer"], checkpoint
        self.data = build_data(config)
        module = build_module(config, self.data)
        self.modules = [module, *(deepcopy(module) for _ in range(replicas - 1))]
        self._made: list[Any] = [module.configure_optimizers() for module in self.modules]
        self.diloco = None
        if replicas:
            settings = instantiate(config["strategy"], _convert_="all").settings
            self.diloco = PlayedReplicas(self.modules, settings, algorithm)
        self.step = 0
        if checkpoint.exists():
            self._load(torch.load(checkpoint, weights_only=False))

    def losses(self, until: float = math.inf, outer_step: bool = True) -> dict[str, float]:
        """Train to the end; return the validation loss in nats per token.

        Args:
            until: `time.time()` at which to stop.
            outer_step: measure the loss of an outer step as the end of the fit, too.

        Returns:
            "validation_loss", of the weights with which a fit ends, and for DiLoCo
            "outer_step_loss".

        Raises:
            Stopped: the time is up.
            FloatingPointError: the run has diverged.
        """
        saved_s = time.monotonic()
        for batch in islice(batches(self.data, self._trainer["max_steps"]), self.step, None):
            take_steps(self.modules, self._made, batch, self._trainer["gradient_clip_val"])
            self.step += 1
            if self.diloco is not None:
                self.diloco.after_steps()
            stops = time.time() >= until
            if stops or time.monotonic() - saved_s > SAVE_EVERY_S:
                self._save()
                saved_s = time.monotonic()
            if stops:
                raise Stopped
        losses = self._evaluate(outer_step)
        if not all(map(math.isfinite, losses.values())):
            raise FloatingPointError(f"The run has diverged: {losses}.")
        self._checkpoint.unlink(missing_ok=True)
        return losses

    def _evaluate(self, outer_step: bool) -> dict[str, float]:
        losses = {}
        if self.diloco is not None and outer_step:
            self._save()  # the outer round changes everything that `finish` needs
            self.diloco.outer_round()
            losses["outer_step_loss"] = token_loss(self.modules[0], self.data.val_dataloader())
            self._load(torch.load(self._checkpoint, weights_only=False))
        if self.diloco is not None:
            self.diloco.finish()
            self.diloco.close()
        losses["validation_loss"] = token_loss(self.modules[0], self.data.val_dataloader())
        return losses

    def _save(self) -> None:
        state = {
            "step": self.step,
            "diloco": None if self.diloco is None else self.diloco.state_dict(),
            "module": self.modules[0].state_dict() if self.diloco is None else None,
            "optimizers": [made["optimizer"].state_dict() for made in self._made],
            "schedulers": [_scheduler(made).state_dict() for made in self._made],
        }
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._checkpoint)

    def _load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        if self.diloco is None:
            self.modules[0].load_state_dict(state["module"])
        else:
            self.diloco.load_state_dict(state["diloco"])
        for made, optimizer, scheduler in zip(
            self._made, state["optimizers"], state["schedulers"], strict=True
        ):
            made["optimizer"].load_state_dict(optimizer)
            _scheduler(made).load_state_dict(scheduler)


def _scheduler(made: Any) -> Any:
    return cast(dict[str, Any], made["lr_scheduler"])["scheduler"]


def losses_of(until: float, work: Path, cell: Cell) -> tuple[dict[str, float], float] | None:
    """Make a run; return its losses and CPU seconds, or None if the time was up before its end.

    A run of another method goes on to its end.
    """
    before_s = _cpu_s()
    outer_step = cell.wire == "fp4" and cell == cell.default  # shown on the page
    try:
        if cell.peer:
            config = composed(cell.overrides(work, work / "cache"))
            losses = {"validation_loss": loss_of(config, METHODS[cell.peer], cell.sync_every)}
        else:
            losses = start(cell, work).losses(until, outer_step)
    except Stopped:
        return None
    return losses, _cpu_s() - before_s


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def start(cell: Cell, work: Path) -> Run:
    """Return a cell's run, continued from its checkpoint if there is one."""
    name = hashlib.sha256(repr(cell).encode()).hexdigest()[:16]
    config = composed(cell.overrides(work, work / "cache"))
    algorithm = RadialDiLoCo if cell.radial else StreamingDiLoCo
    return Run(config, cell.replicas, work / f"{name}.pt", algorithm)
