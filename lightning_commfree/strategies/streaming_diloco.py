"""Streaming DiLoCo, arXiv:2501.18512, in Lightning's life cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.meeting import Stage
from lightning_commfree.diloco import (
    DiLoCoSettings,
    EagerDiLoCo,
    Fragment,
    OuterOptimizerFactory,
    StreamingDiLoCo,
    default_outer_optimizer,
    split_into_fragments,
)
from lightning_commfree.diloco.fragment_exchange import TAG
from lightning_commfree.patches import Patches
from lightning_commfree.resume.whole_files import FilePath
from lightning_commfree.strategies._averages import average_outer_weights
from lightning_commfree.strategies._callbacks import EAGER, REPLICAS, refuse_callbacks
from lightning_commfree.strategies._foretell import foretell
from lightning_commfree.strategies._outer_weights import copies, refuse_written
from lightning_commfree.strategies._resumable import ResumableStrategy
from lightning_commfree.strategies._start import common_start
from lightning_commfree.strategies._trial import let_finders_try
from lightning_commfree.strategies.early_saves import EarlySaves, scores_its_saves
from lightning_commfree.strategies.local_end import LocalEnd

T = TypeVar("T")


class StreamingDiLoCoStrategy(ResumableStrategy):
    """Replicas train apart and exchange outer gradients while they go on computing.

    Every replica takes its own optimizer steps on its own share of the data. After every
    `sync_every` of them a fragment of the model is launched: the difference between the parameters
    on which all replicas last agreed and the local ones travels while training continues.
    `overlap_steps` later it lands: the mean difference is the gradient of an outer optimizer, and
    the result is mixed into the local parameters. Between exchanges a run sends nothing.

    Validation and the `state_dict` of checkpoints use the *outer* weights, on which all replicas
    agree; `fit` ends with the mean of all replicas' weights on all ranks. `WeightAveraging`
    averages the outer weights. Gradient clipping, weight decay and learning-rate schedules act
    inside a replica. A metric that `training_step` logs per step with `sync_dist=True` stays the
    replica's own; per epoch it means all ranks.

    What is frozen sends nothing. Parameters that a callback thaws between two steps
    (`BackboneFinetuning`) become a fragment of their own, and so do frozen ones that hooks move
    apart on the replicas (the teacher of BYOL or DINO), which are averaged; the forecast
    `traffic()` does not know of them.

    Args:
        sync_every: H, inner (optimizer) steps between two syncs of one fragment. 30 to 100 in the
            paper; 1 is the worst.
        num_fragments: P. None: 3 transformer blocks per fragment, plus one fragment for everything
            else.
        fragment_pattern: "strided" (block i to fragment i mod P), "sequential" (consecutive blocks)
            or "balanced" (tensors, equal bytes; for models without blocks).
        overlap_steps: tau, inner steps from launch to landing; 0 blocks. Several fragments may be
            in flight. At most 5 is advised. "eager" hides a whole cycle (arXiv:2502.12996): the
            mean of the previous cycle, with this replica's own part brought up to date; the outer
            weights then differ between replicas until `fit` ends, and rank 0's are saved.
        mix: alpha in [0, 1], weight of the local parameters at a landing: 0 takes the global ones,
            1 ignores them.
        wire_dtype: what travels; see `lightning_commfree.diloco.wire`.
        outer_optimizer: factory, from a list of fp32 parameters to a `torch.optim.Optimizer`; None
            for `SGD(lr=0.4, momentum=0.9, nesterov=True)`. It may return a tuple of the optimizer
            and a learning-rate scheduler, stepped with every landing of its fragment. With
            `start_method="spawn"` it must pickle: a `functools.partial`, not a lambda.
        replica_size: k, consecutive ranks that form one replica: ordinary data parallelism (DDP)
            inside it, with `devices=k, num_nodes=M` one replica per node. Each of its ranks holds
            and exchanges 1/k of the outer state.
        nonfinite: what happens when a replica's weights hold NaN or Inf as a fragment of them
            leaves. "raise": all ranks stop and name it, and no checkpoint with such weights is
            written. "abstain": it does not count in that fragment's mean and goes on from the
            global copy; see `lightning_commfree.diloco.nonfinite`.
        evaluate: what a validation, and the checkpoints written for it, hold. "outer": the outer
            weights, which until a fragment's first landing are the initial ones, and later up to
            `sync_every` steps old. "mean": the plain mean of the replicas' local weights, exchanged
            for it (N/2 bytes in fp4; 4N with eager updates): early stopping and best checkpoints
            then mean something in short runs. A checkpoint without a validation at its step takes
            an exchange of its own. Nothing is trained on it: the fit goes the same way.
        check_drift_every: cycles from one comparison of the replicas' global copies to the next,
            by a hash that travels with the exchange; a difference ends the fit. 0: never.
        outer_device: "cpu" keeps global copies and outer optimizer in (pinned) host memory: 8 bytes
            per parameter less on the device. None: where the parameters are.
        **ddp_kwargs: `start_method`, `process_group_backend`, `timeout`, ... as `DDPStrategy` takes
            them. A link may be down for half of `timeout` (30 minutes by default), and for at most
            about 15 minutes, after which Linux gives its connections up.

    Attributes:
        settings: the arguments above.
        ledger: bytes sent by this rank and seconds waited, by tag.

    Raises:
        ValueError: an argument outside its range.
        TypeError: `outer_optimizer` cannot be called, or an argument is unknown.

    Example::

        strategy = StreamingDiLoCoStrategy(sync_every=50, overlap_steps=2)
        trainer = Trainer(strategy=strategy, devices=2, num_nodes=4)
    """

    _algorithm = "Streaming DiLoCo"
    # two of them look and change nothing; the third may be what a run that has stopped goes on with
    _free_at_resume = frozenset({"check_drift_every", "nonfinite", "evaluate"})

    def __init__(  # noqa: PLR0913 - flat keywords, as YAML files and LightningCLI set them
        self,
        sync_every: int = 100,
        num_fragments: int | None = None,
        fragment_pattern: str = "strided",
        overlap_steps: int | str = 1,
        mix: float = 0.5,
        wire_dtype: str = "fp4",
        outer_optimizer: OuterOptimizerFactory | None = None,
        replica_size: int = 1,
        nonfinite: str = "raise",
        evaluate: str = "outer",
        check_drift_every: int = 1,
        outer_device: str | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(group_size=replica_size, **ddp_kwargs)
        self.settings = DiLoCoSettings(
            sync_every,
            num_fragments,
            fragment_pattern,
            overlap_steps,
            mix,
            wire_dtype,
            default_outer_optimizer if outer_optimizer is None else outer_optimizer,
            replica_size,
            nonfinite,
            evaluate,
            check_drift_every,
            outer_device,
        )
        self._diloco: StreamingDiLoCo | None = None
        self._fragments: list[Fragment] = []
        self._unlanded_reported = False
        self._end = LocalEnd()
        self._early_saves = EarlySaves()
        self._patches = Patches()
        self._put_averages_in: Callable[[], None] | None = None

    @property
    def fragments(self) -> list[list[str]]:
        """The parameter names of every fragment, fragment 0 first; from `on_fit_start` on.

        What joins while a fit runs stands behind the others: thawed parameters, and, without names
        here, frozen ones that hooks move.
        """
        return [list(fragment.parameters) for fragment in self._fragments + self._joined]

    @property
    def _joined(self) -> list[Fragment]:
        outer = [] if self._diloco is None else self._diloco.fragments
        return [one.fragment for one in outer[len(self._fragments) :]]

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Let the LightningModule hold the outer weights in the body, the local ones after it.

        Validation and checkpoints do this by themselves; a callback that looks at the model in
        between may use it: on all ranks with `replica_size` above 1, whose ranks hold a part each.
        Outside of a fit the module holds what it holds.

        Raises:
            RuntimeError: the body has written to parameters.
        """
        if self._diloco is None:
            yield
        else:
            with self._diloco.weight_swap.outer_weights():
                yield

    # -- the life of a fit

    @override
    def _fingerprint(self) -> dict[str, str]:
        return self.settings.fingerprint()

    @override
    def _check_module(self, trainer: pl.Trainer) -> None:
        super()._check_module(trainer)
        eager = EAGER if self.settings.eager else {}
        refuse_callbacks(trainer, type(self).__name__, {**REPLICAS, **eager})

    @override
    def _begin_fit(self, trainer: pl.Trainer) -> None:
        module = self._module
        self._fragments = split_into_fragments(
            module, self.settings.num_fragments, self.settings.fragment_pattern
        )
        algorithm = EagerDiLoCo if self.settings.eager else StreamingDiLoCo
        self._diloco = algorithm(
            module, self._fragments, self.settings, self.channel, self._group_channel
        )
        self._diloco.optimizers = self.optimizers
        # a factory cannot be compared, what it makes can
        assert self._world_channel is not None, "it is open while a fit runs"
        check_agreement(self._world_channel, self._diloco.fingerprint())
        save = trainer.save_checkpoint

        def save_settled(*args: Any, **kwargs: Any) -> None:
            self._meet(again=True)
            with self._settled():  # hooks that add to a checkpoint see what it holds
                save(*args, **kwargs)

        self._patches.put(trainer, "save_checkpoint", save_settled)
        let_finders_try(self, trainer, self._patches)
        averages = average_outer_weights(trainer, module, self._diloco, self._patches)
        self._put_averages_in = averages
        self._end.install(trainer, self._world_channel, self._diloco, self._sigterm)
        self._early_saves = EarlySaves()
        self._unlanded_reported = False

    @override
    def on_train_start(self) -> None:
        if (
            not self._resume.pending
        ):  # else the local weights differ from the outer ones for good reason
            self._take_changed_weights()
        super().on_train_start()
        self._end.begin()
        foretell(self._module.trainer, self._running)

    @override
    def _cycle(self) -> tuple[Mapping[str, int], int]:
        return {TAG: self._running.bytes_per_cycle}, self.settings.sync_every

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._running.stepping():
            return super().optimizer_step(*args, **kwargs)

    @override
    def _after_step(self, stop: bool) -> bool:
        stop_agreed = self._running.after_step(stop)
        return self._end.after_step(stop) or stop_agreed

    @override
    def _figures(self) -> dict[str, float]:
        """Per fragment what its latest landing says; the same figures until the next one."""
        return self._running.figures()

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._diloco is not None:
            self._end.meeting.enter(Stage.VALIDATION)
            self._meet(again=True, validates=True)
            if not self._module.trainer.sanity_checking:
                self._report_unlanded("validation")
            if self._end.finished:
                refuse_written(self._diloco)
            self._diloco.weight_swap.put_in(self._shown())

    @override
    def on_validation_end(self) -> None:
        if self._diloco is not None:
            self._diloco.weight_swap.put_back()
            self._end.meeting.stands = False
        super().on_validation_end()

    @override
    def on_train_end(self) -> None:
        if self._diloco is not None:
            self._end.meeting.enter(Stage.FIT_END)
            self._end.finish()
            self._early_saves.write_again(self._module.trainer, self._running.step)
            assert self._put_averages_in is not None, "a fit has begun"
            self._put_averages_in()
        super().on_train_end()

    @override
    def teardown(self) -> None:
        if self._diloco is not None:
            # an exception may have come in the middle of a validation
            self._diloco.weight_swap.put_back(check=False)
            self._end_without_training()
            self._diloco.close()
            self._fragments += self._joined
            self._diloco = self._put_averages_in = None
        self._end.remove()
        self._patches.remove()
        super().teardown()

    # -- collectives of Lightning's

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._meet():
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return super().broadcast(obj, src) if self._meet() else obj

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(tensor, group, reduce_op) if self._meet() else tensor

    # -- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the outer weights, and nothing in flight.

        What is exchanged is copied where the module goes on with the local weights at once.
        """
        with self._settled() as stay:
            state = super().lightning_module_state_dict()
            return state if stay else copies(state, self._running)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: FilePath, storage_options: Any | None = None
    ) -> None:
        if self._diloco is not None and not self._stopped_by_hand():
            if self._end.alone:
                self._early_saves.owe(filepath, "optimizer_states" not in checkpoint)
                return
            assert self._world_channel is not None, "it is open while a fit runs"
            self._diloco.refuse_to_save(self._world_channel)
            self._report_unlanded("checkpoint")
            if not self._end.finished:
                weights_only = "optimizer_states" not in checkpoint
                self._early_saves.note(filepath, self._diloco.step, weights_only)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: FilePath) -> None:
        self._early_saves.forget(filepath)
        super().remove_checkpoint(filepath)

    @override
    def _rank_state(self) -> dict[str, Any]:
        return {**self._running.state_dict(), "finished": self._end.finished}

    @override
    def _load_rank_state(self, state: dict[str, Any]) -> None:
        self._running.load_state_dict(state)
        if state["finished"]:  # a second time would move nothing
            self._end.finished_at = self._running.step

    @override
    def _resume_fingerprint(self) -> dict[str, str]:
        return self._running.fingerprint()

    # -- inside

    @property
    def _running(self) -> StreamingDiLoCo:
        assert self._diloco is not None, "the algorithm lives from `setup` to `teardown` of a fit"
        return self._diloco

    @contextmanager
    def _settled(self) -> Iterator[bool]:
        """In the body the module holds the outer weights, and nothing is on the wire.

        It is given whether these weights stay in the module after it.
        """
        if self._diloco is None or self._stopped_by_hand():
            yield True
            return
        if not scores_its_saves(self._module.trainer):  # else the scored weights are saved first
            self._finish_if_ending()
        self._diloco.wait_in_flight()
        stay = self._diloco.weight_swap.is_in
        with self._diloco.weight_swap.outer_weights(self._shown()):
            yield stay

    def _shown(self) -> list[Tensor] | None:
        """Return what the module holds in place of the outer weights; None: these."""
        diloco, sanity = self._running, self._module.trainer.sanity_checking
        if (
            self.settings.evaluate == "outer"
            or self._end.finished
            or sanity
            or diloco.weight_swap.is_in
        ):
            return None
        return diloco.evaluation.weights(diloco.step)

    def _take_changed_weights(self) -> None:
        """Begin with what `on_fit_start` or `on_train_start` have made of the weights.

        DDP would train them. Here the outer weights must be the same, and the same on all ranks:
        rank 0's.
        """
        if any(self.all_flags(not self._running.weight_swap.is_local())):
            assert self._world_channel is not None, "it is open while a fit runs"
            common_start(self._world_channel, self._module, self._fingerprint())
            self._running.weight_swap.take_local()

    def _end_without_training(self) -> None:
        """Leave outer weights in the module where a resumed fit had nothing left to train."""
        status = self._module.trainer.state.status
        if self._end.finished_at is None and status != TrainerStatus.INTERRUPTED:
            self._running.weight_swap.put_in()

    def _meet(self, again: bool = False, validates: bool = False) -> bool:
        """See, before a collective of Lightning's, that all ranks come to it; else end the fit."""
        return self._training_step_runs or self._end.meet(again, validates)

    def _finish_if_ending(self) -> None:
        """Finish ahead of a validation or checkpoint that turned out to be the last."""
        self._end.finish_if_near()
        if self._end.finished:
            self._running.follow_hooks()

    def _report_unlanded(self, what: str) -> None:
        text = None if self._unlanded_reported else self._running.unready(what)
        if text is not None:
            self._unlanded_reported = True
            rank_zero_warn(text)
