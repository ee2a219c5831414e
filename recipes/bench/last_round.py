"""How a DiLoCo fit ends: outer step or plain mean? `python -m recipes.bench.last_round`.

A fit ends with one round over every fragment. It takes the plain mean of the replicas' local
weights; it was an outer step with `mix` 0. All that comes before is the same, so one training run
gives the loss after either, and after a third: the mean with the differences sent in fp32. All
cells of the quality grid, with the learning rates that `results/quality.json` has found, the
default outer settings first, then the tuned ones. The replicas are played in one process
(`_played_diloco`). Results are kept as they come, beside the page, so a second call goes on where
the first one stopped. Further words go to all runs as overrides.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipes.bench._played_diloco import LAST_ROUNDS, train
from recipes.bench._played_lion import Config
from recipes.bench.demo import RESULTS
from recipes.bench.kept import MISSING, Results, load, mean_text, save
from recipes.bench.page import provenance, write_page
from recipes.bench.quality_grid import COMMON, DEFAULTS, TUNED, OuterByM, Run, Size, best_lr, cells
from recipes.bench.quality_grid import Losses as Others
from recipes.bench.quality_grid import ddp as ddp_run
from recipes.bench.side_by_side import made

CONF = Path(__file__).parents[2] / "conf"
SETTINGS: dict[str, OuterByM] = {"the defaults": DEFAULTS, "tuned": TUNED}
HOW_TO_READ = """\
Validation loss in nats per token over the whole validation split, after each kind of last round of
the same training run: "outer step", the outer optimizer steps once more and the local weights are
its result; "mean", the plain mean of the replicas' local weights, whose differences to the global
copy travel in fp4, which is what a fit does; "mean, fp32", the same with nothing rounded on the
wire. "Outer - mean" is taken run by run, in nats: positive where the mean is better. ± is the
standard deviation over the seeds. One of the two wins a cell if that difference's mean is further
from 0 than its standard deviation; with a single seed nothing is said. DDP's losses and all
learning rates are those of [the quality grid](quality.md). Replicas are played in one process of
one thread: bit for bit what processes come to, but for what their number of threads does to a sum.
Runs that have not been made are missing, and the next call makes them."""


@dataclass(frozen=True)
class End(Run):
    """A run of the quality grid with one of `LAST_ROUNDS`."""

    last_round: str = "mean"


Losses = dict[End, float]


def planned(others: Others, seeds: int) -> Iterator[Run]:
    """Yield the runs in their order: all cells with one seed, then the next; defaults first."""
    for outer, seed in product(SETTINGS.values(), range(1, seeds + 1)):
        yield from cells(others, "fp4", seed, outer)


def done(losses: Losses) -> dict[Run, float]:
    """Return the runs of which every last round is known, with the mean's loss."""
    runs = {_run(end): loss for end, loss in losses.items() if end.last_round == "mean"}
    return {run: loss for run, loss in runs.items() if all(e in losses for e in ends(run))}


def ends(run: Run) -> list[End]:
    """Return a run with each of its last rounds."""
    return [End(**asdict(run), last_round=name) for name in LAST_ROUNDS]


def _run(end: End) -> Run:
    return Run(**{field.name: getattr(end, field.name) for field in fields(Run)})


def configuration(run: Run, size: Size, overrides: Sequence[str]) -> Config:
    """Return what `recipes.pretrain` would be given, with the global batch, as plain values."""
    batch = f"data.batch_size={size.blocks_per_step}"
    words = ["run_dir=none", *run.overrides(size), batch, *overrides]  # nothing is written there
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("pretrain", words)
    return cast(Config, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def losses_of(run: Run, size: Size, overrides: Sequence[str]) -> dict[str, float]:
    """Make one run and return its validation loss in nats per token after each last round."""
    return train(configuration(run, size, overrides))


def new_pool(jobs: int) -> Executor:
    """Return so many processes of one thread each."""
    spawn = get_context("spawn")  # a fork would inherit this process's threads as locks
    return ProcessPoolExecutor(jobs, spawn, initializer=torch.set_num_threads, initargs=(1,))


def differences(losses: Losses, runs: Sequence[Run]) -> list[float]:
    """Return, seed by seed, the loss after the outer step minus that after the mean."""
    at = [{end.last_round: losses.get(end) for end in ends(run)} for run in runs]
    pairs = [(losses_by_end["outer"], losses_by_end["mean"]) for losses_by_end in at]
    return [outer - mean for outer, mean in pairs if outer is not None and mean is not None]


def winner(found: Sequence[float]) -> str:
    """Return which of the two is better by more than the seeds' spread, or "neither"."""
    if len(found) < 2:
        return "one seed" if found else MISSING
    mean = statistics.mean(found)
    if abs(mean) <= statistics.stdev(found):
        return "neither"
    return "mean" if mean > 0 else "outer step"


def page_lines(results: Results[End], others: Others, size: Size, seeds: int) -> list[str]:
    """Return the page as lines of Markdown."""
    losses = results.losses
    lines = ["# The last round of a DiLoCo fit: outer step or plain mean", ""]
    for name, outer in SETTINGS.items():
        lines += _finding(losses, others, name, outer, seeds)
    lines += [
        "",
        *(line for block in results.made_by for line in block),
        f"- every run: {size.steps:,} optimizer steps of {size.blocks_per_step} blocks by all"
        f" replicas together, `{' '.join(COMMON)}`",
        "",
        *HOW_TO_READ.splitlines(),
    ]
    for name, outer in SETTINGS.items():
        knobs = [f"M = {replicas}: {setting}." for replicas, setting in outer.items()]
        lines += ["", f"## Outer settings: {name}", "", *knobs, ""]
        lines += _table(losses, others, outer, seeds)
    return lines


def _finding(losses: Losses, others: Others, name: str, outer: OuterByM, seeds: int) -> list[str]:
    """Return what the settings' cells say, in a sentence or two."""
    by_verdict: dict[str, list[str]] = {}
    for cell in cells(others, "fp4", 1, outer):
        found = differences(losses, _seeds(cell, seeds))
        text = f"{cell.model} M = {cell.replicas} H = {cell.sync_every}"
        by_verdict.setdefault(winner(found), []).append(
            text if not found else f"{text} ({mean_text(found, '+.4f')})"
        )
    words = {
        "mean": "the mean is better by more than the seeds' spread in",
        "outer step": "the outer step is better by more than the seeds' spread in",
        "neither": "neither is in",
        "one seed": "only one seed was run in",
        MISSING: "not run:",
    }
    lines = [f"With the outer settings of {name} (outer step - mean, in nats):", ""]
    for verdict, text in words.items():
        named = by_verdict.get(verdict, [])
        if named or verdict == "outer step":
            lines.append(f"- {text} {len(named)} cells{': ' if named else ''}{', '.join(named)}.")
    return [*lines, ""]


def _table(losses: Losses, others: Others, outer: OuterByM, seeds: int) -> list[str]:
    lines = [
        "| model | M | H | seeds | DDP | outer step | mean | mean, fp32 | outer - mean | wins |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells(others, "fp4", 1, outer):
        runs = _seeds(cell, seeds)
        lr = best_lr(others, ddp_run(cell.model)) or 0.0
        theirs = [ddp_run(cell.model, seed, lr) for seed in range(1, seeds + 1)]
        ddp = [others[job] for job in theirs if job in others]
        found = differences(losses, runs)
        columns = {
            name: [
                losses[end]
                for run in runs
                for end in ends(run)
                if end.last_round == name and end in losses
            ]
            for name in LAST_ROUNDS
        }
        texts = [mean_text(columns[name], ".4f") for name in ("outer", "mean", "mean_fp32")]
        lines.append(
            f"| {cell.model} | {cell.replicas} | {cell.sync_every} | {len(found)} of {seeds}"
            f" | {mean_text(ddp, '.4f')} | {' | '.join(texts)}"
            f" | {mean_text(found, '+.4f')} | {winner(found)} |"
        )
    return lines


def _seeds(cell: Run, seeds: int) -> list[Run]:
    return [replace(cell, seed=seed) for seed in range(1, seeds + 1)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing; write results and page after every run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, a thread each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run later")
    parser.add_argument("--quality", type=Path, default=RESULTS / "quality.json")
    parser.add_argument("--results", type=Path, default=RESULTS / "last_round.json")
    options, more = parser.parse_known_args(arguments)
    size = Size()
    setting = {**asdict(size), "common": COMMON, "overrides": more}
    others = load(options.quality, {**setting, "overrides": []}, Run).losses
    command = ["python", "-m", "recipes.bench.last_round", f"--seeds={options.seeds}", *more]
    block = provenance(shlex.join(command))
    results = load(options.results, setting, End)
    page = options.results.with_suffix(".md")
    write_page(page, page_lines(results, others, size, options.seeds))
    have = done(results.losses)
    plan = partial(planned, others, options.seeds)
    one = partial(losses_of, size=size, overrides=more)
    with new_pool(options.jobs) as pool:
        for run, found in made(pool, options.jobs, have, plan, one, options.seconds):
            print(f"{run}: {found}", flush=True)
            for end in ends(run):
                results.add(end, found[end.last_round], block)
            have[run] = found["mean"]
            save(options.results, results)
            write_page(page, page_lines(results, others, size, options.seeds))


if __name__ == "__main__":
    main()
