"""Fine-tune a DDP and a DiLoCo checkpoint of about equal loss: `python -m benchmarks.downstream`.

nanochat-DiLoCo (arXiv:2511.13761) reports equal losses after pretraining and worse results after
fine-tuning. For each seed, a tiny GPT-2 is pretrained with DDP and with DiLoCo, and both are
fine-tuned on the bundled dialogues with the same settings. DDP takes as many steps as give it
DiLoCo's loss within 0.25 percent, or the nearest found, for each seed. (One number of steps for all
seeds did not do: the losses to compare differed by up to 3 percent.)

Criterion, written before the runs. Let the difference be DiLoCo's loss above DDP's in percent. The
reported gap shows if the difference after fine-tuning minus that after pretraining has a mean over
the seeds above its standard deviation, and above 0.3 percent. It can only be judged if the mean
difference after pretraining is within 0.5 percent.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.page import draw_bars, provenance, result_page, write_page
from benchmarks.common.runs import mean_text
from benchmarks.downstream.training import (
    BLOCKS_PER_STEP,
    CONTEXT,
    DDP_LENGTHS,
    DILOCO_STEPS,
    EQUAL,
    MIX,
    MOMENTUM,
    OUTER_LR,
    REPLICAS,
    SYNC_EVERY,
    TUNING_LR,
    TUNING_ROWS,
    TUNING_STEPS,
    finetune,
    pretrain_both,
)

PAGE = Path(__file__).with_name("result.md")
TITLE = "Does a DiLoCo checkpoint fine-tune worse than a DDP checkpoint of the same loss?"
SHOWS = 0.3  # percent, of the criterion
STAGES = ("pretrained", "untuned", "tuned")
Losses = dict[str, dict[str, float]]  # by stage and run, nats per token
HOW_TO_READ = """\
Losses in nats per token over a whole validation split: "pretrained" on Shakespeare's held-out
works, "untuned" and "tuned" on the responses of its dialogues, before and after fine-tuning.
Differences are DiLoCo's loss above DDP's in percent, per seed; ± is their standard deviation over
the seeds. Replicas are simulated in one process, bit for bit equal to separate ones."""


def losses_of(seed: int, cache_dir: str) -> Losses:
    """Pretrain and fine-tune both models of a seed, and return their losses."""
    losses: Losses = {stage: {} for stage in STAGES}
    for name, found in pretrain_both(seed, cache_dir).items():
        before, after = finetune(found.module, found.tokenizer, seed, cache_dir)
        losses["pretrained"][name] = found.loss
        losses["untuned"][name], losses["tuned"][name] = before, after
        print(f"seed {seed}: {name}, {found.steps} steps: {losses}", flush=True)
    return losses


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
    """Make the runs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("outputs/cache"))
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    block = provenance("downstream", [f"--seeds={options.seeds}"], options.page)
    by_seed = {seed: losses_of(seed, str(options.cache)) for seed in range(1, options.seeds + 1)}
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
        "- pretraining: a GPT-2 of width 32 with two layers on Shakespeare,"
        f" {BLOCKS_PER_STEP} blocks of {CONTEXT} tokens in a step; DiLoCo {DILOCO_STEPS:,} steps"
        f" with M = {REPLICAS}, H = {SYNC_EVERY}, lr {OUTER_LR}, momentum {MOMENTUM}, mix {MIX};"
        f" DDP as many as give the same loss, between {DDP_LENGTHS[0]} and {DDP_LENGTHS[1]}",
        f"- fine-tuning: all parameters, {TUNING_STEPS} steps of {TUNING_ROWS} rows of {CONTEXT}"
        f" tokens, AdamW with lr {TUNING_LR}",
        "",
        *HOW_TO_READ.splitlines(),
        "",
        *table(by_seed),
    ]
    write_page(options.page, result_page(TITLE, opening, [block], body))


if __name__ == "__main__":
    main()
