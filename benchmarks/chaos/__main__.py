"""Kill, stop and cut off replicas under several methods: `python -m benchmarks.chaos`.

Runs every method undisturbed and disturbed, about 30 minutes in all, and writes the result page.
It needs Linux, root, iproute2, torchft, obstore and moto. The exit code is 1 if a method does not
train. Further words are overrides of `conf/pretrain.yaml` for all runs, such as `data=synthetic`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos.events import schedule
from benchmarks.chaos.job import Outcome, run
from benchmarks.chaos.page import (
    TITLE,
    Runs,
    body,
    draw,
    figures_of,
    opening,
    table,
    undisturbed_rate,
)
from benchmarks.chaos.plan import DDP, METHODS, Plan
from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.common.pretraining import composed
from benchmarks.lab import LaboratoryUnavailable, exit_on_signals
from recipes.training.evaluation import token_loss
from recipes.training.pretraining import build_data, build_module
from recipes.training.report import CHECKPOINT_FOLDER

PAGE = Path(__file__).with_name("result.md")
SAVE_S = 5.0  # between two checkpoints
# steps between two checkpoints in the undisturbed run, before the speed is known
_FIRST_SAVE = dict.fromkeys(METHODS, 40) | {DDP: 22}
_BATCHES = 24  # of a validation
_STEPS = 1_000_000  # never reached: the runs end by time


def curve_of(config: dict[str, Any], outcome: Outcome) -> list[tuple[float, float]]:
    """Return the validation loss of all checkpoints of a run, by seconds since all train."""
    data = build_data(config)
    module = build_module(config, data)
    found = []
    for path in (outcome.folder / CHECKPOINT_FOLDER).glob("step-*.ckpt"):
        saved_s = path.stat().st_mtime - outcome.window.begun_s
        if 0 <= saved_s <= outcome.window.seconds:
            state = torch.load(path, weights_only=True)["state_dict"]
            # torchft's file has no head, which is tied to the embedding
            unknown = module.load_state_dict(state, strict=False).unexpected_keys
            assert not unknown, unknown
            found.append((saved_s, token_loss(module, islice(data.val_dataloader(), _BATCHES))))
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all methods, print and write everything; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--seconds", type=float, default=190.0, help="of a disturbed run (%(default)s)")
    add("--undisturbed-seconds", type=float, default=75.0, help="%(default)s")
    add("--methods", nargs="+", choices=METHODS, default=METHODS)
    add("--seed", type=int, default=1, help="of the events (%(default)s)")
    add("--rate", default="100mbit", help="of every link (%(default)s)")
    add("--step-seconds", type=float, default=0.1, help="%(default)s")
    add("--sync-every", type=int, default=20, help="%(default)s")
    add("--overlap-steps", type=int, default=1, help="of all DiLoCo methods (%(default)s)")
    add("--heartbeat-timeout", type=float, default=2.0, help="of torchft (%(default)s)")
    add("--work", type=Path, default=Path("outputs/bench/chaos"))
    add("--page", type=Path, default=PAGE)
    options, more = parser.parse_known_args(arguments)
    exit_on_signals()
    block = provenance("chaos", arguments, options.page)
    torch.set_num_threads(1)
    config = composed(
        ["experiment=demo", f"trainer.max_steps={_STEPS}", "trainer.limit_val_batches=0"]
        + ["optimizer.final_lr_fraction=1.0", *more]
    )
    build_data(config).prepare_data()  # once, not in every process
    plan = Plan(
        "",
        config,
        options.step_seconds,
        options.sync_every,
        save_every=0,
        heartbeat_timeout_s=options.heartbeat_timeout,
        meeting="",
        addresses=[],
        ends_s=0.0,
        overlap_steps=options.overlap_steps,
    )
    planned = schedule(options.seed, options.seconds)

    runs: dict[str, Runs] = {}
    failures: dict[str, str] = {}
    for method in options.methods:
        folders = []
        for kind in ("undisturbed", "disturbed"):
            folders.append((options.work / method.replace(" ", "_") / kind).resolve())
            shutil.rmtree(folders[-1], ignore_errors=True)
            folders[-1].mkdir(parents=True)
        try:
            print(f"== {method}, undisturbed", flush=True)
            this = plan._replace(method=method, save_every=_FIRST_SAVE[method])
            calm = run(this, folders[0], options.rate, [], options.undisturbed_seconds)
            this = this._replace(save_every=max(1, round(SAVE_S * undisturbed_rate(calm))))
            print(f"== {method}, disturbed", flush=True)
            rough = run(this, folders[1], options.rate, planned, options.seconds)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            if isinstance(error, LaboratoryUnavailable) and not runs:
                return 2
            failures[method] = str(error)
            continue
        runs[method] = Runs(calm, rough, curve_of(config, calm), curve_of(config, rough))
        print("\n".join(table({method: figures_of(method, runs[method])})), flush=True)

    if not runs:
        return 1
    found = {method: figures_of(method, one) for method, one in runs.items()}
    picture = options.page.with_suffix(".png")
    options.page.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, found, picture)
    text = body(runs, plan, options.rate, options.seed, SAVE_S, planned)
    top = opening(found, failures, picture.name)
    write_page(options.page, result_page(TITLE, top, [block], text))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
