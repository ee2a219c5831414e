"""Fine-tune a DDP and a DiLoCo checkpoint of about equal loss: `python -m benchmarks.downstream`.

nanochat-DiLoCo (arXiv:2511.13761) reports equal losses after pretraining and worse results after
fine-tuning. For each seed, a tiny GPT-2 is pretrained with DDP and with DiLoCo, and both are
fine-tuned on the bundled dialogues by the same command. DDP takes fewer steps, so that both start
from about the same loss. A run whose folder has a summary is not repeated. Further words are
overrides for the pretraining runs.

Criterion, written before the runs. Let the difference be DiLoCo's loss above DDP's in percent. The
reported gap shows if the difference after fine-tuning minus that after pretraining has a mean over
the seeds above its standard deviation, and above 0.3 percent. It can only be judged if the mean
difference after pretraining is within 0.5 percent.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.page import draw_bars, provenance, result_page, write_page
from benchmarks.common.pretraining import summary_of
from benchmarks.common.runs import mean_text
from benchmarks.quality.grid import TUNED, Run, Size

PAGE = Path(__file__).with_name("result.md")
TITLE = "Does a DiLoCo checkpoint fine-tune worse than a DDP checkpoint of the same loss?"
SIZE = Size(width=32, blocks_per_step=64, steps=1000)
REPLICAS, SYNC_EVERY = 4, 100
DDP_STEPS = 700  # chosen with seed 0, which the page does not use, for DiLoCo's loss
CONTEXT = "data.block_size=64"  # dialogues of 120 characters fit
RUNS = {
    "ddp": (Run("gpt2_tiny", "none", 2, 0, 0, 0.0226), DDP_STEPS),
    "diloco": (
        Run("gpt2_tiny", "fp4", REPLICAS, SYNC_EVERY, 0, 0.0113).with_outer(TUNED[REPLICAS]),
        SIZE.steps,
    ),
}
TUNING = [
    "data=dialogues",
    CONTEXT,
    "data.batch_size=32",
    "strategy=ddp",
    "trainer.devices=1",
    "trainer.max_steps=200",
    "trainer.val_check_interval=200",
    "optimizer.lr=1e-3",
    "checkpoint_every_n_steps=0",
    "report.sample_tokens=1",
    "logger=none",
]
EQUAL, SHOWS = 0.5, 0.3  # percent, of the criterion
STAGES = ("pretrained", "untuned", "tuned")
Losses = dict[str, dict[str, float]]  # by stage and run, nats per token
HOW_TO_READ = """\
Losses in nats per token over a whole validation split: "pretrained" on Shakespeare's held-out
works, "untuned" and "tuned" on the responses of its dialogues, before and after fine-tuning.
Differences are DiLoCo's loss above DDP's in percent, per seed; ± is their standard deviation over
the seeds."""


def losses_of(seed: int, work: Path, more: Sequence[str]) -> Losses:
    """Pretrain and fine-tune both models of a seed, and return their losses."""
    losses: Losses = {stage: {} for stage in STAGES}
    for name, (run, steps) in RUNS.items():
        folder = work / f"{name}_{seed}"
        words = [*run.overrides(SIZE), CONTEXT, f"trainer.max_steps={steps}", f"seed={seed}"]
        words += [f"trainer.val_check_interval={steps}", *more]
        pretrained = _summary("pretrain", words, folder / "pretrain")
        words = [*TUNING, f"model.name_or_path={pretrained['huggingface']}", f"seed={seed}"]
        tuned = _summary("finetune", words, folder / "finetune")
        losses["pretrained"][name] = pretrained["validation_loss"]
        losses["untuned"][name] = tuned["initial_loss"]
        losses["tuned"][name] = tuned["validation_loss"]
    return losses


def _summary(recipe: str, words: Sequence[str], folder: Path) -> Mapping[str, Any]:
    saved = folder / "summary.json"
    if saved.exists():
        found: Mapping[str, Any] = json.loads(saved.read_text())
        return found
    return summary_of(words, folder, recipe)


def percent(losses: Mapping[str, float]) -> float:
    """Return DiLoCo's loss above DDP's in percent."""
    return 100 * (losses["diloco"] / losses["ddp"] - 1)


def verdict(by_seed: Mapping[int, Losses]) -> str:
    """Apply the criterion of this module's docstring."""
    before = [percent(losses["pretrained"]) for losses in by_seed.values()]
    after = [percent(losses["tuned"]) for losses in by_seed.values()]
    grown = [late - early for early, late in zip(before, after, strict=True)]
    if len(grown) < 2:
        return "one seed gives no verdict"
    text = f"{mean_text(before, '+.2f')} % before, {mean_text(after, '+.2f')} % after"
    if abs(statistics.mean(before)) > EQUAL:
        return f"not judged, the losses before are not equal within {EQUAL} %: {text}"
    mean, spread = statistics.mean(grown), statistics.stdev(grown)
    shows = "shows" if mean > max(spread, SHOWS) else "does not show"
    return f"the reported gap {shows}: {text}, a growth of {mean_text(grown, '+.2f')} points"


def table(by_seed: Mapping[int, Losses]) -> list[str]:
    """Return the losses of all seeds as Markdown lines."""
    head = " | ".join(f"{stage}: DDP | DiLoCo | difference" for stage in STAGES)
    lines = [f"| seed | {head} |", f"|---|{'---|' * 3 * len(STAGES)}"]
    for seed, losses in by_seed.items():
        cells = [
            f"{losses[s]['ddp']:.4f} | {losses[s]['diloco']:.4f} | {percent(losses[s]):+.2f} %"
            for s in STAGES
        ]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("outputs/bench/downstream"))
    parser.add_argument("--page", type=Path, default=PAGE)
    options, more = parser.parse_known_args(arguments)
    block = provenance("downstream", [f"--seeds={options.seeds}", *more], options.page)
    seeds = range(1, options.seeds + 1)
    by_seed = {seed: losses_of(seed, options.work, more) for seed in seeds}
    picture = options.page.with_suffix(".png")
    groups = {
        f"seed {seed}": {stage: percent(losses[stage]) for stage in STAGES}
        for seed, losses in by_seed.items()
    }
    draw_bars(picture, "DiLoCo's loss above DDP's", "percent", groups)
    opening = [
        "nanochat-DiLoCo ([arXiv:2511.13761](https://arxiv.org/abs/2511.13761)) reports equal"
        " losses after pretraining, and worse results after fine-tuning. Does that show in a tiny"
        " GPT-2?",
        "",
        f"**Found:** {verdict(by_seed)}.",
        "",
        f"![DiLoCo's loss above DDP's, by seed and stage]({picture.name})",
    ]
    body = [
        "## The runs",
        "",
        f"- pretraining: a GPT-2 of width {SIZE.width} with two layers on Shakespeare,"
        f" {SIZE.blocks_per_step} blocks of 64 tokens in a step; DDP {DDP_STEPS} steps, DiLoCo"
        f" {SIZE.steps:,} steps with M = {REPLICAS}, H = {SYNC_EVERY}, {TUNED[REPLICAS]}",
        f"- fine-tuning, the same for both: `python -m recipes.finetune {' '.join(TUNING)}`",
        "",
        *HOW_TO_READ.splitlines(),
        "",
        *table(by_seed),
    ]
    write_page(options.page, result_page(TITLE, opening, [block], body))


if __name__ == "__main__":
    main()
