"""What replicas lose that exchange as often as a link hides, and what a larger batch changes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

from benchmarks.bandwidth.figures import LABELS
from benchmarks.common.runs import mean_text
from benchmarks.size_ladder.cells import (
    ACCUMULATED,
    BATCHES,
    BLOCK,
    CHOSEN,
    HALF,
    LOCAL_SGD,
    LONE,
    LONG,
    MIXED_MEAN,
    MODELS,
    OFTEN,
    SEARCHED,
    SHORT,
    SPARSE_EVERY,
    TUNED,
    Cell,
    Losses,
    lone_cells,
    lr_of,
    pairs,
    peer_cells,
    percent,
    reference,
    row,
    sparse_cells,
    with_own_rate,
)
from benchmarks.size_ladder.picture import longer_runs

REPLICAS = (2, 4, 8)
SIZE = TUNED[-1]
BATCH_MODEL = "llama"
AIMS = {2: (0.5, 1.05), 4: (1.0, 1.1), 8: (2.0, 1.2)}  # percent above DDP, factor of tokens
TOP_K_LIMIT = 0.5  # percent above fp4
README_AIM = 2.0  # percent above DDP: GPT-2, M = 2
SIGMAS = 2.0
PEER_LABELS = LABELS | {"ddp_powersgd_late": "DDP, PowerSGD rank 4 after 10 % of the steps"}
SUCCESS = f"""\
Written down before the first run with H = {OFTEN}:

- *As often as a link hides.* At {SIZE} with {SHORT} tokens per parameter and H = {OFTEN}, the
  smallest that `sync_every="auto"` chooses, DDP and each M take the rate that is best with seed 1:
  it has a worse one on both sides. Over three seeds of each model, the mean gap is at most
  +0.5, +1.0 and +2.0 % for M = 2, 4 and 8, and the factor of tokens at most 1.05, 1.1 and 1.2.
  GPT-2 with M = 2, README's configuration, ends at most {README_AIM} % above DDP, at the H that
  `sync_every="auto"` chooses for it. That was {CHOSEN} when exchanges were allowed 1.25 % of a
  replica's time. After the first runs with H = {CHOSEN}, that became 2 %, and H {OFTEN}.
- *Local SGD.* At {SIZE}, M = 2 and H = {OFTEN}, also the plain mean of the replicas' weights (outer
  rate 1, no momentum, mix 0), each model with its own best rate. It "wins" or "loses" if its loss
  is below or above that of the default outer step with the same seed by more than {SIGMAS:.0f}
  standard errors of the mean, over the pairs of the models that have three seeds. If it wins, it
  becomes the default for small H. Written down before the first of these runs, when M = 2 had been
  run with the default. M = 4 has a verdict of its own, written down before its first run.
- *What people would do instead.* GPT-2 at {SIZE} with two ranks, each method with its own best
  rate: no verdict, the losses stand beside the times and bytes of `benchmarks.bandwidth`. Written
  down before the first of these runs, when local SGD had been run as above, with our overlap.
  PowerSGD that begins to compress after a tenth of the steps was added when the others had been
  run, because torch's documentation suggests it.
- *Mean with mix 0.5.* Llama at {SEARCHED} with {LONG} tokens per parameter, H = {OFTEN}, M = 2 and
  4, batches as below: the mean of the replicas' weights (outer rate 1, no momentum), mixed like the
  default outer step with the weights of a replica, so that it discards no steps. Each with its own
  best rate. Per batch it "wins" or "loses" as local SGD does, over the pairs of both M. It becomes
  the default for H = {OFTEN} if it wins at both batches; if it wins at the larger one only, the
  docs say so and the default stays. Written down before the first of these runs.
- *One worker.* GPT-2 at {SIZE}: what a second machine is worth. One worker takes half of DDP's
  batch, once for as many steps, so half of the tokens, and once for twice as many. No verdict.
  Written down before the first of these runs.
- *Muon with a larger batch.* Llama at {SEARCHED} with {LONG} tokens per parameter, M = 4,
  H = {OFTEN} and {BATCHES[-1]} times its size's batch: the mean gap to DDP with Muon is at most
  half of AdamW's to DDP with AdamW, each with its own best rate. Written down before the first of
  these runs.
- *Top-k in its own regime.* Llama at {SEARCHED} with {LONG} tokens per parameter, M = 2,
  H = {SPARSE_EVERY} (257 exchanges), the plain mean, an overlap of one step and error feedback of
  0.95: `examples/topk_codec.py` (1.6 % of the values) ends at most {TOP_K_LIMIT} % above fp4 with
  the same settings, each with its own best rate, in the mean over three pairs. If so, it becomes a
  wire of the library; otherwise it stays an example. Written down before the first of these runs.
- *Factor of tokens.* How many times as many tokens DiLoCo takes as DDP to the same loss. DDP's
  loss is interpolated linearly over log(tokens), between complete runs of {HALF}, {SHORT} and
  {LONG} tokens per parameter with the same seed and rate.
- *Batch.* Llama at {SEARCHED} with {LONG} tokens per parameter and H = {OFTEN}, with batches of
  {BATCHES[0]} and {BATCHES[1]} times its size's, each with its own best rate. More tokens per
  replica and step "help" if the gap at equal batch is smaller with the larger batch for each of
  M = 2, 4 and 8, by more than {SIGMAS:.0f} standard errors of the difference. Best against best:
  the better batch of each method."""


def often_cell(model: str, replicas: int, sync_every: int = OFTEN) -> Cell:
    """Return a cell of the first table, with open rate."""
    return Cell(model, SIZE, 1, 0, replicas, sync_every).default


def local_sgd_pairs(losses: Losses, model: str, replicas: int) -> list[tuple[Cell, Cell]]:
    """Return the runs of local SGD and those of the default outer step, with their best rates."""
    cell = often_cell(model, replicas)
    return pairs(losses, replace(cell, **LOCAL_SGD), cell, with_own_rate)


def mixed_mean_pairs(losses: Losses, replicas: int, batch: int) -> list[tuple[Cell, Cell]]:
    """Return the runs of the mean with mix 0.5 and those of the default outer step."""
    cell = batch_cell(replicas, batch)
    return pairs(losses, replace(cell, **MIXED_MEAN), cell, with_own_rate)


def batch_cell(replicas: int, batch: int) -> Cell:
    """Return a cell of the second table, with open rate."""
    cell = Cell(BATCH_MODEL, SEARCHED, 1, 0, replicas, OFTEN, LONG, batch=batch)
    return cell.default if replicas else reference(cell)


def runs_of(losses: Losses, cell: Cell) -> list[tuple[Cell, Cell]]:
    """Return the runs of a cell and those of DDP, each with its own best rate."""
    return pairs(losses, cell, reference(cell), with_own_rate)


def gaps_of(losses: Losses, cell: Cell) -> list[float]:
    """Return the percent above DDP of each seed."""
    return [percent(losses, *runs) for runs in runs_of(losses, cell)]


def tokens_factor(losses: Losses, run: Cell) -> float | None:
    """Return how many times as many tokens a run takes as DDP to the same loss; None: unknown."""
    points = []
    for tokens in (HALF, SHORT, LONG):
        ddp = row(losses, replace(reference(run), tokens_per_parameter=tokens))
        if ddp is not None and ddp in losses:
            points.append((math.log(tokens), losses[ddp]))
    for (low, before), (high, after) in pairwise(points):
        if before >= losses[run] >= after:
            share = (before - losses[run]) / (before - after)
            return run.tokens_per_parameter / math.exp(low + share * (high - low))
    return None


def summary(losses: Losses) -> list[str]:
    """Return the answer in three sentences, for the top of the page."""
    parts = []
    for m, model in product(REPLICAS, MODELS):
        runs = runs_of(losses, often_cell(model, m))
        if len(runs) > 2:
            gap = mean_text([percent(losses, *each) for each in runs], "+.2f", " %")
            factor = _factor_text([tokens_factor(losses, run) for run, _ in runs])
            parts.append(f"{gap} with M = {m} ({model}), which is {factor} times the tokens")
    if not parts:
        return ["Replicas that exchange as often as a link hides have not been run yet."]
    longer = [group for group in longer_runs(losses) if len(group) > 1]
    falls = sum(group[-1].percent < group[0].percent for group in longer)
    return [
        f'At {SIZE} and H = {OFTEN}, the smallest H that the default `sync_every="auto"` chooses,'
        f" replicas end above DDP by {'; '.join(parts)} of DDP to the same loss (three seeds)."
        " The gap grows with the number of replicas (M) and with the steps between exchanges (H);"
        f" five times the training shrinks it in {falls} of {len(longer)} settings. A replica here"
        " takes a small part of a small batch, in a short run; the papers' replicas are at the"
        " right, with more steps and many more tokens in each."
    ]


def findings(losses: Losses) -> list[str]:
    """Return the verdicts on runs that exchange often or take larger batches."""
    lines = []
    for m in REPLICAS:
        parts, gaps, factors = [], [], []
        for model in MODELS:
            runs = runs_of(losses, often_cell(model, m))
            found = [percent(losses, *each) for each in runs]
            of_tokens = [tokens_factor(losses, run) for run, _ in runs]
            gaps += found if len(found) > 2 else []
            factors += of_tokens if len(found) > 2 else []
            if found:
                told = _factor_text(of_tokens)
                parts.append(f"{model} {mean_text(found, '+.2f', ' %')}, {told} times the tokens")
        if gaps:
            line = f"- **Found, M = {m}, H = {OFTEN}:** at {SIZE}, {'; '.join(parts)} of DDP."
            line += f" Aims, {AIMS[m][0]:+} % and {AIMS[m][1]} times: {_judged(m, gaps, factors)}."
            lines.append(line)
    for every in (OFTEN, CHOSEN):
        readme = gaps_of(losses, often_cell(MODELS[0], 2, every))
        if readme:
            told = "met" if statistics.mean(readme) <= README_AIM else "missed"
            gap = f"{mean_text(readme, '+.2f', ' %')} ({len(readme)} seeds)"
            head = f"- **Found, README's configuration, H = {every}:**"
            lines.append(f"{head} {gap}; at most +{README_AIM} %: {told}.")
    lines += _other_batches(losses) + _sparse(losses)
    return lines + _batch_finding(losses)


def _other_batches(losses: Losses) -> list[str]:
    """Return how far DDP with accumulated gradients, and one worker alone, end above DDP."""
    lines = []
    half, all_tokens = lone_cells()
    for what, cell in (
        (
            f"DDP that adds the gradients of {ACCUMULATED} batches",
            replace(all_tokens, batch=ACCUMULATED),
        ),
        (f"one worker, {LONE:g} of the batch, as many steps", half),
        (f"one worker, {LONE:g} of the batch, twice as many steps", all_tokens),
    ):
        ddp = replace(cell, batch=1, tokens_per_parameter=SHORT)
        runs = pairs(losses, cell, ddp, with_own_rate)
        gap = mean_text([percent(losses, *each) for each in runs], "+.2f", " %")
        lines += [
            f"- **Found, {what}:** {gap} above DDP"
            f" ({MODELS[0]}, {SIZE}, {len(runs)} seeds, with its own best rate)."
        ] * bool(runs)
    return lines


def _sparse(losses: Losses) -> list[str]:
    """Return the verdict on top-k where few values are sent in many exchanges."""
    runs = pairs(losses, *sparse_cells(), with_own_rate)
    if len(runs) < 3:
        return []
    gaps = [percent(losses, *each) for each in runs]
    told = "met" if statistics.mean(gaps) <= TOP_K_LIMIT else "missed"
    cell, _ = sparse_cells()
    return [
        f"- **Found, top-k in its own regime, M = 2, H = {SPARSE_EVERY}:**"
        f" {mean_text(gaps, '+.2f', ' %')} above fp4 with the same settings ({cell.model},"
        f" {cell.size}, {len(runs)} seeds). Target, at most +{TOP_K_LIMIT} %: {told}."
    ]


def _judged(m: int, gaps: Sequence[float], factors: Sequence[float | None]) -> str:
    known = [factor for factor in factors if factor is not None]
    gap = "met" if statistics.mean(gaps) <= AIMS[m][0] else "missed"
    enough = len(known) == len(factors) and statistics.mean(known) <= AIMS[m][1]
    return f"{gap} and {'met' if enough else 'missed'}"


def _factor_text(factors: Sequence[float | None]) -> str:
    known = [factor for factor in factors if factor is not None]
    return mean_text(known, ".2f") if len(known) == len(factors) else f"more than {SHORT / HALF:g}"


def _batch_finding(losses: Losses) -> list[str]:
    changes = []
    for m in REPLICAS:
        small, large = (
            gaps_of(losses, batch_cell(m, batch)) for batch in (BATCHES[0], BATCHES[-1])
        )
        if min(len(small), len(large)) < 3:
            continue
        error = math.sqrt(sum(statistics.variance(each) / len(each) for each in (small, large)))
        changes.append((m, statistics.mean(small), statistics.mean(large), error))
    helps = all(large - small < -SIGMAS * error for _, small, large, error in changes)
    if helps and len(changes) < len(REPLICAS):  # or one that does not is enough
        return []
    texts = [f"{small:+.2f} to {large:+.2f} % (M = {m})" for m, small, large, _ in changes]
    return [
        f"- **Found, batch:** with {BATCHES[-1]} times the tokens per step the gap goes from"
        f" {', '.join(texts)}: more tokens per replica and step"
        f" {'help' if helps else 'do not help each time'}."
    ]


def often_table(losses: Losses) -> list[str]:
    """Return the runs with the smallest H as Markdown lines."""
    lines = [
        "| model | M | H | seeds | DDP's rate | DDP | our rate | DiLoCo | gap | factor of tokens |",
        "|" + "---|" * 10,
    ]
    for m, model, every in product(REPLICAS, MODELS, (OFTEN, CHOSEN)):
        runs = runs_of(losses, often_cell(model, m, every))
        if runs:
            factors = _factor_text([tokens_factor(losses, run) for run, _ in runs])
            lines.append(f"| {model} | {m} | {every} | {_columns(losses, runs)} | {factors} |")
    return lines


def peers_table(losses: Losses) -> list[str]:
    """Return the runs of other methods as Markdown lines."""
    lines = [
        "| method | H | seeds | DDP's rate | DDP | its rate | its loss | gap |",
        "|" + "---|" * 8,
    ]
    for cell in peer_cells():
        runs = runs_of(losses, cell)
        if runs:
            every = 1 if cell.peer.startswith("ddp") else cell.sync_every
            often = (cell.peer, cell.sync_every) == ("torchft_delay", OFTEN)
            label = PEER_LABELS["torchft_often" if often else cell.peer]
            lines.append(f"| {label} | {every} | {_columns(losses, runs)} |")
    return lines


def batch_table(losses: Losses) -> list[str]:
    """Return the runs with larger batches as Markdown lines."""
    lines = [
        "| M | tokens per replica and step | steps | seeds | DDP's rate | DDP | our rate | DiLoCo |"
        " gap | best against best |",
        "|" + "---|" * 10,
    ]
    for m in REPLICAS:
        found = [runs_of(losses, batch_cell(m, batch)) for batch in BATCHES]
        for runs in found:
            if runs:
                cell, _ = runs[0]
                tokens = f"{cell.blocks * BLOCK // m:,} | {cell.steps:,}"
                best = _best_against_best(losses, found)
                lines.append(f"| {m} | {tokens} | {_columns(losses, runs)} | {best} |")
    return lines


def _columns(losses: Losses, runs: Sequence[tuple[Cell, Cell]]) -> str:
    (ours, ddp), *_ = runs
    return (
        f"{len(runs)} | {lr_of(ddp.rung)} | {mean_text([losses[run] for _, run in runs], '.4f')}"
        f" | {lr_of(ours.rung)} | {mean_text([losses[run] for run, _ in runs], '.4f')}"
        f" | {mean_text([percent(losses, *each) for each in runs], '+.2f', ' %')}"
    )


def _best_against_best(losses: Losses, found: Sequence[Sequence[tuple[Cell, Cell]]]) -> str:
    if not all(found):
        return ""
    ours, ddp = (
        min(statistics.mean(losses[run[place]] for run in runs) for runs in found)
        for place in (0, 1)
    )
    return f"{100 * (ours / ddp - 1):+.2f} %"
