"""Bad input and bad gradients with `DistributedLionStrategy`: what is said, and on which ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree import DistributedLion, DistributedLionStrategy
from tests.fit.models import Recorder, Tiny, Voter, assert_same, loader, quiet_trainer
from tests.world import run_ranks


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"vote": "median"}, ValueError, "`vote='median'` is not valid. Choose one of 'majority',"),
        ({"overlap": "no"}, TypeError, "`overlap='no'` must be True or False."),
        ({"check_drift_every": 2.5}, TypeError, "`check_drift_every=2.5` must be an integer"),
        (
            {"momentum_sync_every": 4},
            TypeError,
            "`DistributedLionStrategy` does not accept the argument `momentum_sync_every`."
            " Supported arguments: `vote`, `ties`, `nonfinite`, `node_size`,",
        ),
        (
            {"find_unused_parameters": True},
            TypeError,
            "LionStrategy` does not accept the argument `find_unused_parameters`. Supported",
        ),
    ],
)
def test_settings(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        DistributedLionStrategy(**arguments)


class Other(Tiny):
    """AdamW, as `Tiny` has it."""


class Reordered(Voter):
    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return DistributedLion(parameters[::-1] if self.global_rank else parameters)


class OtherRate(Voter):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=0.1 * (1 + self.global_rank))


class Foreign(Voter):
    def configure_optimizers(self) -> Any:
        return DistributedLion([*self.parameters(), nn.Parameter(torch.zeros(3))])


class Complex(Voter):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


class Sparse(Voter):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.zeros(len(x), dtype=torch.long)))


class Meddling(Voter):
    """Writes to gradients after their vote has begun, without any hook that could be seen."""

    def optimizer_step(self, epoch: int, i: int, optimizer: Any, closure: Any) -> None:
        def meddling() -> Any:
            loss = closure()
            self.head.weight.grad.mul_(2)
            return loss

        optimizer.step(closure=meddling)


class Drifting(Voter):
    def on_train_batch_start(self, batch: Any, i: int) -> None:
        if i == 3 and self.global_rank == 1:
            with torch.no_grad():
                self.blocks[2].bias[0] += 1e-7


class Plateau(Voter):
    """A scheduler watches what is a rank's own; rank 1's gets worse."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.log("own", float(self.trainer.global_step * (1 if self.global_rank else -1)))
        return super().training_step(batch, i)

    def configure_optimizers(self) -> Any:
        lion = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(lion, factor=0.5, patience=0)
        watching = {"scheduler": plateau, "monitor": "own", "interval": "step"}
        return {"optimizer": lion, "lr_scheduler": watching}


class Poisoned(Voter):
    """Rank 1's gradient of one parameter is NaN in step 4."""

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 3:
            self.blocks[1].weight.grad[0, 0] = float("nan")


class PoisonedEarly(Voter):
    """The same within backward, so that votes may leave during it."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        if self.global_rank == 1 and self.trainer.global_step == 3:
            return loss * float("inf")
        return loss


CASES = [
    (
        Other,
        {},
        "TypeError",
        "requires `DistributedLion`, but"
        " `configure_optimizers` returned `AdamW`, which does not support voting",
    ),
    (Reordered, {}, "ValueError", "parameter 0 of group 0 is head.weight on rank 1, embed.weight"),
    (OtherRate, {}, "ValueError", "lr of group 0 is 0.2 on rank 1, 0.1 on rank 0"),
    (Foreign, {}, "ValueError", "1 parameters of `DistributedLion` are not registered in"),
    (Complex, {}, "TypeError", "supports only real floating-point parameters"),
    (Sparse, {}, "TypeError", "The gradient of 'table.weight' is sparse"),
    (
        Meddling,
        {},
        "RuntimeError",
        "The gradient of 'head.weight' changed after its vote was launched",
    ),
    (Drifting, {"check_drift_every": 2}, "AgreedError", "parameters differ before step 5"),
    (
        Plateau,
        {},
        "AgreedError",
        "The workers have different learning rates, betas or weight decay",
    ),
    (Poisoned, {}, "AgreedError", "of 'blocks.1.weight' on rank 1 contains NaN or Inf"),
    (PoisonedEarly, {}, "AgreedError", "on rank 1 contains NaN or Inf (and"),
    (Voter, {"node_size": 3}, "ValueError", "this job (2) is not divisible by `node_size=3`"),
]


def misuse(rank: int, size: int) -> list[Any]:
    said = []
    for module, settings, _, _ in CASES:
        recorder = Recorder()
        trainer = quiet_trainer(
            strategy=DistributedLionStrategy(**settings),
            devices=size,
            max_steps=8,
            callbacks=[recorder],
        )
        made = module()
        try:
            trainer.fit(made, loader(64))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            kind, text = type(error).__name__, str(error)
        else:
            kind, text = "", ""
        left = {name: p.detach().clone() for name, p in made.named_parameters()}
        said.append((kind, text, recorder.local, left))
    said.append(abstain(rank, size))
    return said


def abstain(rank: int, size: int) -> Any:
    recorder = Recorder()
    strategy = DistributedLionStrategy(nonfinite="abstain")
    trainer = quiet_trainer(
        strategy=strategy, devices=size, max_steps=8, callbacks=[recorder], log_every_n_steps=1
    )
    trainer.fit(Poisoned(), loader(64))
    momenta = torch.cat([s["momentum"].flatten() for s in trainer.optimizers[0].state.values()])
    return recorder.local, momenta, strategy.figures()["lion/abstentions"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(misuse, 2, tmp_path_factory.mktemp("misuse"))


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: CASES[i][0].__name__)
def test_all_ranks_are_told(ranks: list[Any], case: int) -> None:
    _, _, error, text = CASES[case]
    for outcomes in ranks:
        kind, message, *_ = outcomes[case]
        assert kind == error, message
        assert text in message


def test_nothing_is_changed_by_the_step_that_stops(ranks: list[Any]) -> None:
    modules = [module for module, *_ in CASES]
    for outcomes in ranks:
        for stopping in (Poisoned, PoisonedEarly, Plateau):
            _, _, local, left = outcomes[modules.index(stopping)]
            assert len(local) == (2 if stopping is Plateau else 3), "the next step did not happen"
            assert_same(left, local[-1])


def test_a_worker_with_nan_abstains_and_recovers(ranks: list[Any]) -> None:
    """Its vote of that step is missing: two workers' other one decides alone."""
    for outcomes in ranks:
        local, momenta, abstentions = outcomes[-1]
        assert len(local) == 8
        assert momenta.isfinite().all()
        assert abstentions == 1
        assert_same(local, ranks[0][-1][0])
        change = (local[3]["head.weight"] - local[2]["head.weight"]).abs()
        torch.testing.assert_close(change, torch.full_like(change, 0.02), rtol=1e-4, atol=0)
