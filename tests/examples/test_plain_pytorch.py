"""A loop without a Trainer trains as the strategy does, bit for bit."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.diloco import DiLoCoSettings, streaming_diloco
from lightning_commfree.host import pl
from lightning_commfree.lion import LionSettings, distributed_lion
from tests.fit.models import quiet_trainer
from tests.forks import run_forked, run_typed
from tests.world import free_port, run_ranks

PATH = Path(__file__).resolve().parents[2] / "examples" / "plain_pytorch.py"
EPOCHS = 2


class Module(pl.LightningModule):
    """The example's model and loss."""

    def __init__(self, example: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.loss_of = example["make_net"](), example["loss_of"]

    def training_step(self, batch: Any, _: int) -> Any:
        return self.loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def refused(net: torch.nn.Module, error: type[Exception], text: str, **settings: Any) -> None:
    with pytest.raises(error, match=text), streaming_diloco(net, **settings):
        pass


def both(rank: int, size: int) -> Any:
    example = runpy.run_path(str(PATH))
    net = example["make_net"]()
    if rank:
        torch.nn.init.zeros_(net[0].weight)  # rank 0's weights count
    diloco = example["train"](net, example["make_loader"](), EPOCHS)
    with (
        pytest.raises(TypeError, match=r"`evaluate` is for a Trainer"),
        streaming_diloco(net, evaluate="mean"),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"sync_every is 11 on rank 1, 10 on rank 0"),
        streaming_diloco(net, sync_every=10 + rank),
    ):
        pass
    with pytest.raises(KeyError), streaming_diloco(net):
        raise KeyError("an error in the loop")

    module = Module(example)
    strategy = StreamingDiLoCoStrategy(sync_every=20, overlap_steps=2)
    trainer = quiet_trainer(
        strategy=strategy, devices=size, max_epochs=EPOCHS, use_distributed_sampler=False
    )
    trainer.fit(module, example["make_loader"]())
    assert diloco.step == trainer.global_step
    return [p.detach() for p in net.parameters()], [p.detach() for p in module.parameters()]


class Voting(Module):
    """The same with votes."""

    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=1e-3)


def both_vote(rank: int, size: int, overlap: bool) -> Any:
    example = runpy.run_path(str(PATH))
    net, loader = example["make_net"](), example["make_loader"]()
    if rank:
        torch.nn.init.zeros_(net[0].weight)
    optimizer = DistributedLion(net.parameters(), lr=1e-3)
    with (
        pytest.raises(TypeError, match=r"`node_size` is for a Trainer"),
        distributed_lion(net, optimizer, node_size=2),
    ):
        pass
    sgd: Any = torch.optim.SGD(net.parameters())
    with pytest.raises(TypeError, match=r"not `SGD`: use"), distributed_lion(net, sgd):
        pass
    with distributed_lion(net, optimizer, overlap, vote="average") as votes:
        for batch in loader:
            with votes.stepping():
                example["loss_of"](net, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    module = Voting(example)
    strategy = DistributedLionStrategy(vote="average")
    trainer = quiet_trainer(
        strategy=strategy, devices=size, max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(module, example["make_loader"]())
    return [p.detach() for p in net.parameters()], [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_votes_as_the_strategy_does_bit_for_bit(tmp_path: Path, overlap: bool) -> None:
    (loop, fit), (other, _) = run_ranks(both_vote, 2, tmp_path, overlap)
    assert all(map(torch.equal, loop, fit))
    assert all(map(torch.equal, loop, other))


def test_the_loop_equals_the_strategy_bit_for_bit(tmp_path: Path) -> None:
    (loop, fit), (other, _) = run_ranks(both, 2, tmp_path)
    assert all(map(torch.equal, loop, fit))
    assert all(map(torch.equal, loop, other))


def test_the_command_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = re.search(r"torchrun .*", PATH.read_text("utf-8"))
    assert command is not None
    monkeypatch.chdir(PATH.parents[1])
    port = f"torchrun --master-port {free_port()}"
    log = tmp_path / "log"
    with log.open("wb") as output:
        run_forked([run_typed, command[0].replace("torchrun", port)], check=True, stdout=output)
    said = log.read_text()
    sums = re.findall(r"rank \d: 256 steps, weights sum to (\S+)", said)
    assert len(sums) == 2, said
    assert sums[0] == sums[1]
    assert len(re.findall(r"sent [\d,]+ bytes", said)) == 2


def test_without_a_process_group_a_loop_is_refused() -> None:
    assert not dist.is_initialized()
    with (
        pytest.raises(RuntimeError, match=r"Call `torch.distributed.init_process_group` first"),
        streaming_diloco(torch.nn.Linear(2, 1)),
    ):
        pass


def test_settings_have_the_defaults_of_the_strategy() -> None:
    assert DiLoCoSettings() == StreamingDiLoCoStrategy().settings
    assert LionSettings() == DistributedLionStrategy().settings
