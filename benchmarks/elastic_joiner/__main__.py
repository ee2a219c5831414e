"""Measure what a joiner's fresh optimizer costs: `python -m benchmarks.elastic_joiner`.

A replica that joins an elastic job gets the outer weights; its inner optimizer starts with fresh
state. Two replicas train a small GPT-2 on the letters of Shakespeare in one process. The second
dies once in the middle, or every 100 steps; its successor begins with fresh state or with a copy of
the first one's. Prints the validation losses, and writes the result page. Further words are
overrides for all runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import deepcopy
from itertools import islice
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.common.pretraining import Config, batches, composed, take_steps
from benchmarks.size_ladder.played import PlayedReplicas
from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.diloco import StreamingDiLoCo
from recipes.training.evaluation import token_loss
from recipes.training.pretraining import build_data, build_module

PAGE = Path(__file__).with_name("result.md")
TITLE = "What does a fresh inner optimizer cost a joining replica?"
STEPS = 600
JOINS = {"one": [302], "five": [102, 202, 302, 402, 502]}  # nothing is in flight after these steps
STATES = ("fresh", "donor")
STRATEGY: dict[str, Any] = {"sync_every": 20, "overlap_steps": 1}
BOUND_PERCENT = 0.5  # of the loss, mean over the seeds; above it, the donor's state is worth it
VALIDATION_BATCHES = 100
SETTINGS = ["tokenizer=bytes", "model.n_layer=2", "data.batch_size=16"]  # of both replicas
HOW_TO_READ = """\
*Undisturbed*: both replicas train from beginning to end. *Fresh*, *donor*: the second replica is
replaced; the new one begins with the outer weights, and its inner optimizer with no state or with a
copy of the first replica's. The learning rate continues, and as in an elastic job a replica counts
in proportion to its steps since the last landing or since it joined. *Loss*: nats per byte, of the
final weights. *Cost*: the change from the undisturbed run of the same seed, and its standard error
over the seeds. Fresh minus donor is what the state alone costs."""


class Weighted(StreamingDiLoCo):
    """Streaming DiLoCo with the weights and the joiners of an elastic job."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._since = [0] * len(self.fragments)

    def join(self) -> None:
        """Begin with the outer weights."""
        assert not self.flights, "a joiner would not merge what landed before it came"
        self._since = [self.step] * len(self.fragments)
        for fragment in self.fragments:
            fragment.merge(mix=0.0)
            fragment.clear_residual()

    @override
    def _weight(self, p: int) -> int:
        return self.step - self._since[p]

    @override
    def _outer_step(self, p: int, mean: Tensor, *frozen: Any) -> None:
        super()._outer_step(p, mean, *frozen)
        self._since[p] = self.step


def loss_of(config: Config, joins: Sequence[int], state: str) -> float:
    """Return the validation loss of a run in which the second replica is replaced at some steps."""
    pl.seed_everything(config["seed"], verbose=False)
    data = build_data(config)
    module = build_module(config, data)
    modules = [module, deepcopy(module)]
    made: list[Any] = [one.configure_optimizers() for one in modules]
    played = PlayedReplicas(modules, StreamingDiLoCoStrategy(**STRATEGY).settings, Weighted)
    joiner: Any = played.replicas[1]
    for step, batch in enumerate(batches(data, config["trainer"]["max_steps"]), 1):
        take_steps(modules, made, batch, config["trainer"]["gradient_clip_val"])
        played.after_steps()
        if step in joins:
            joiner.join()
            donor, mine = (one["optimizer"] for one in made)
            mine.state.clear()
            if state == "donor":
                mine.load_state_dict(deepcopy(donor.state_dict()))
    played.finish()
    played.close()
    return token_loss(module, islice(data.val_dataloader(), VALIDATION_BATCHES))


def cost(losses: dict[str, list[float]], name: str, than: str) -> tuple[float, float]:
    """Return how much more a run loses than another one in percent, and its standard error."""
    pairs = zip(losses[name], losses[than], strict=True)
    found = [100 * (mine / theirs - 1) for mine, theirs in pairs]
    return fmean(found), stdev(found) / sqrt(len(found)) if len(found) > 1 else 0.0


def page(losses: dict[str, list[float]], block: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the page and the lines that are printed."""
    rows, checks = [], []
    for joins in JOINS:
        for state in STATES:
            name = f"{joins}, {state}"
            percent, error = cost(losses, name, "undisturbed")
            shown = " | ".join(f"{loss:.4f}" for loss in losses[name])
            rows.append(f"| {name} | {shown} | {percent:+.2f} ± {error:.2f} % |")
        percent, error = cost(losses, f"{joins}, fresh", f"{joins}, donor")
        verdict = "met" if percent <= BOUND_PERCENT else "missed"
        checks.append(
            f"With {joins} replacement{'s' * (joins != 'one')} the fresh state costs"
            f" {percent:+.2f} ± {error:.2f} % of the loss, compared with the donor's (bound:"
            f" {BOUND_PERCENT:+} %): {verdict}."
        )
    undisturbed = " | ".join(f"{loss:.4f}" for loss in losses["undisturbed"])
    seeds = range(1, len(losses["undisturbed"]) + 1)
    opening = [
        "A replica that joins an elastic job gets the outer weights, but no inner optimizer state."
        " Two replicas train; the second is replaced. Would the first one's state help the new one?"
        f" Below {BOUND_PERCENT} % it is not worth sending twice the model's size.",
        "",
        f"**Found:** {' '.join(checks)}",
    ]
    body = [
        "## Method",
        "",
        f"{STEPS} steps, `{' '.join(SETTINGS)}`, with `sync_every={STRATEGY['sync_every']}` and"
        f" `overlap_steps={STRATEGY['overlap_steps']}`; replaced after step"
        f" {', or after '.join(', '.join(map(str, steps)) for steps in JOINS.values())}.",
        "",
        *HOW_TO_READ.splitlines(),
        "",
        "## Losses",
        "",
        f"| replacements, state | {' | '.join(f'seed {seed}' for seed in seeds)} | cost |",
        f"|---|{'---|' * len(seeds)}---|",
        f"| undisturbed | {undisturbed} | |",
        *rows,
    ]
    return result_page(TITLE, opening, [block], body), checks


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything; write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic_joiner", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--seeds", type=int, default=3)
    options, words = parser.parse_known_args(arguments)
    block = provenance("elastic_joiner", arguments, options.page)
    torch.set_num_threads(1)
    plans: dict[str, tuple[list[int], str]] = {"undisturbed": ([], "fresh")}
    plans |= {f"{n}, {state}": (steps, state) for n, steps in JOINS.items() for state in STATES}
    losses: dict[str, list[float]] = {name: [] for name in plans}
    for seed in range(1, options.seeds + 1):
        run_words = [f"seed={seed}", "trainer.devices=2", f"trainer.max_steps={STEPS}", *SETTINGS]
        config = composed(["experiment=demo", *run_words, *words])
        for name, (steps, state) in plans.items():
            losses[name].append(loss_of(config, steps, state))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    text, checks = page(losses, block)
    print(*checks, sep="\n")
    write_page(options.page, text)


if __name__ == "__main__":
    main()
