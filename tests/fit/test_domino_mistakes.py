"""Models, optimizers and callbacks that Domino does not support are refused on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import callbacks
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_commfree import DominoTPStrategy
from tests.fit.causal_lm import CausalLM, words
from tests.fit.models import Tiny, dataset, quiet_trainer
from tests.world import run_ranks


class Early(CausalLM):
    """Makes its optimizer before the model is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


class Rows(CausalLM):
    """Its optimizer keeps a number for a row and one for a column."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Compiled(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped["lm"] = torch.compile(self.wrapped["lm"])


class Adapted(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        lora = LoraConfig(target_modules=["c_fc"], fan_in_fan_out=True, lora_dropout=0.1)
        self.wrapped["lm"] = get_peft_model(self.wrapped["lm"], lora)


class AllMeta(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped["lm"] = self.wrapped["lm"].to("meta")


class Meta(AllMeta):
    """A layer besides the model has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2, device="meta")


class HalfMeta(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped["lm"].transformer.ln_f.to("meta")


class Manual(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Mistake(NamedTuple):
    """A fit and the texts of its `ValueError`; without texts it is a good one."""

    module: type[Any]
    texts: tuple[str, ...] = ()
    verb: str = "fit"
    apart: bool = False  # every rank validates on rows of its own
    trainer: dict[str, Any] = {}


def with_callback(callback: Any, why: str) -> Mistake:
    text = f"`DominoTPStrategy` does not support the callback `{type(callback).__name__}`: {why}"
    return Mistake(CausalLM, (text,), trainer={"callbacks": [callback]})


AVERAGES: list[Any] = [callbacks.StochasticWeightAveraging(swa_lrs=0.1)]
if hasattr(callbacks, "WeightAveraging"):
    AVERAGES.append(callbacks.EMAWeightAveraging())
MISTAKES = [
    Mistake(CausalLM),
    Mistake(Early, ("The optimizer holds ", "Create both in `configure_optimizers`")),
    Mistake(Rows, ("`Adafactor` keeps a '", "Use an element-wise optimizer")),
    Mistake(CausalLM, ("ranks of a replica must validate on the same batch",), apart=True),
    *(with_callback(average, "it copies the full model") for average in AVERAGES),
    with_callback(callbacks.ModelPruning("l1_unstructured"), "it would choose what"),
    Mistake(Tiny, ("found no model in `Tiny` that it can shard (its",)),
    Mistake(Compiled, ("is already compiled (in `OptimizedModule`)",)),
    Mistake(Adapted, ("its dropout mask would differ between ranks. Set",)),
    Mistake(Meta, ("2 tensors, including 'head.weight', are on the meta device and",)),
    Mistake(HalfMeta, ("2 tensors, including 'wrapped.lm.transformer.ln_f.weight', are on",)),
    Mistake(AllMeta, ("initializes them only in `fit`",), verb="validate"),
    Mistake(Manual, ("`DominoTPStrategy` does not support manual optimization",)),
    Mistake(CausalLM, ("does not support precision='16-true'",), trainer={"precision": "16-true"}),
    Mistake(CausalLM),  # a refused fit leaves nothing behind
]


def play(rank: int, size: int) -> list[str]:
    said = []
    for mistake in MISTAKES:
        trainer = quiet_trainer(
            strategy=DominoTPStrategy(),
            devices=size,
            max_steps=2,
            use_distributed_sampler=False,
            **mistake.trainer,
        )
        rows = dataset(4 * size) if mistake.module is Tiny else words(4 * size)
        sampler = DistributedSampler(rows, size, rank if mistake.apart else 0, shuffle=False)
        train, validation = DataLoader(rows, batch_size=2), DataLoader(rows, 2, sampler=sampler)
        loaders = (train, validation) if mistake.verb == "fit" else (validation,)
        try:
            getattr(trainer, mistake.verb)(mistake.module(), *loaders)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_mistakes_are_refused_on_all_ranks_and_disturb_no_good_fit(tmp_path: Path) -> None:
    torch.compile(nn.Linear(1, 1))  # imports for seconds: here, and not on every rank
    for said in run_ranks(play, 2, tmp_path):
        for text, mistake in zip(said, MISTAKES, strict=True):
            assert bool(text) == bool(mistake.texts), (mistake, text)
            assert all(part in text for part in mistake.texts), text
