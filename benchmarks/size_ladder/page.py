"""Result page of the size ladder, made from its records: text, tables and figure."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from benchmarks.common.page import result_page
from benchmarks.common.runs import MISSING, mean_text
from benchmarks.size_ladder.cells import (
    BATCHES,
    BLOCK,
    LOCAL_SGD_REPLICAS,
    LONG,
    MIXED_MEAN_REPLICAS,
    MODELS,
    NAMES,
    OFTEN,
    OPTIMIZERS,
    OUTER,
    OVERLAP,
    REPLICAS,
    SEARCHED,
    SHORT,
    SIZES,
    TRIALS,
    TUNED,
    VOCABULARY,
    Cell,
    Losses,
    WithRate,
    change_of_trial,
    lr_of,
    pairs,
    percent,
    reference,
    row,
    with_own_rate,
)
from benchmarks.size_ladder.corpus import RECIPE
from benchmarks.size_ladder.often import (
    BATCH_MODEL,
    SIZE,
    batch_cell,
    batch_table,
    findings,
    gaps_of,
    local_sgd_pairs,
    mixed_mean_pairs,
    often_table,
    peers_table,
    summary,
)
from benchmarks.size_ladder.often import SUCCESS as SUCCESS_OFTEN
from benchmarks.size_ladder.picture import PAPER_BATCH
from benchmarks.size_ladder.records import Records

TITLE = "How far is the loss of Streaming DiLoCo from DDP's, and what does that depend on?"
TARGETS = {2: 0.5, 4: 1.5, 8: 2.5}  # percent above DDP at the largest size, H = 100
# wire, the wire that it is compared with, largest difference in percent
WIRE_TARGETS = (
    ("fp4", "fp32", 0.3),
    ("int2", "fp32", 0.3),
    ("topk", "fp4", 0.5),
    ("sparseloco", "fp4", 0.5),
)
MUON_TARGET = 0.5  # of AdamW's gap
MORE_TRAINING = (2, 4)  # replicas of the longer runs
GROWING = "gpt2"  # the model whose gap was larger after the longer runs
SEEDS = 3
RUNS = SEEDS * len(MODELS)
SIGMAS = 2.0  # a difference counts if it exceeds so many standard errors
# arXiv:2501.18512, Tables 5 and 6 (C4, 20 tokens per parameter, FP4 with overlap), loss by millions
# of parameters: DDP; (M, H): (2, 30), (2, 100), (4, 30), (4, 100)
PAPER = {
    35: (3.51, 3.53, 3.56, 3.60, 3.64),
    100: (3.19, 3.21, 3.22, 3.25, 3.29),
    200: (2.97, 2.98, 3.00, 3.02, 3.05),
    300: (2.80, 2.81, 2.83, 2.84, 2.87),
    500: (2.67, 2.67, 2.69, 2.70, 2.73),
    1000: (2.49, 2.48, 2.50, 2.50, 2.53),
}
PAPER_CELLS = ((2, 30), (2, 100), (4, 30), (4, 100))
SUCCESS = f"""\
Written down before the first run (that one model may decide *targets* and *trend*: before the first
run at 0.2M):

- *Targets.* At the largest size measured with three seeds, with H = 100 and {SHORT} tokens per
  parameter, the mean gap to DDP is at most +0.5, +1.5 and +2.5 % for M = 2, 4, 8.
- *Trend.* For each M, the mean gap at the largest size measured with three seeds, minus that of the
  same models at the smallest. It "shrinks" or "grows" if the difference exceeds {SIGMAS:.0f}
  standard errors, otherwise it is "flat".
- *Resolution.* s is the standard deviation of the gap over seeds, pooled over all cells with
  several seeds. A gap over n runs differs from 0 if it exceeds {SIGMAS:.0f} s/sqrt(n), and two gaps
  differ if they are {SIGMAS:.0f} s sqrt(2/n) apart.
- *Wire.* fp4 costs at most 0.3 % against fp32.

Written down before the first run with topk, Muon or another outer step, when int2 and half of fp32
had been run:

- *Wires.* int2 ends at most 0.3 % above fp32 with H = 100, topk at most 0.5 % above fp4 with
  H = 30, for M = 2 and 4 each. Runs are compared with the run of the same seed; the figure is the
  mean over the pairs of the models that have three seeds. "Undecided" if the limit is within
  {SIGMAS:.0f} standard errors of the mean.
- *Muon.* With M = 4 and H = 100 the mean gap to DDP with Muon is at most half of AdamW's to DDP
  with AdamW, over the models that have three seeds (Llama runs first).
- *Outer step.* Every trial runs with Llama, seed 1 and M = 4; the best two also with all seeds,
  GPT-2 and M = 8 as far as there is time. One of them wins for an M if its loss is below the
  default's of the same seed, in the mean over the pairs by more than {SIGMAS:.0f} standard errors.
  The library's default changes if a trial wins here and is not worse at {LONG} tokens per
  parameter. Restarts and radial averaging become options of the library only if they win.

Written down before the first run at 0.8M, when {LONG} tokens per parameter had been run with GPT-2
0.2M, M = 2 (three seeds) and Llama 0.04M, M = 4 (one seed):

- *More training.* "The gap closes" if it is smaller with {LONG} tokens per parameter than with
  {SHORT} for M = 2 and 4 and both models at 0.04M, each in the mean over three seeds by more than
  {SIGMAS:.0f} standard errors of the difference. The wires' and Muon's limits at {LONG} tokens per
  parameter are those above.
- *0.8M.* One seed, with rates that are not tuned at this size: no verdict on targets or trend.

Written down before the first longer run with another learning rate, when GPT-2's gap at 0.04M had
been found to be larger with {LONG} tokens per parameter than with {SHORT}:

- *Rates of longer runs.* For GPT-2 at 0.04M, DDP and M = 2, 4, the rate is searched again with
  {LONG} tokens per parameter and seed 1, from the short runs' best one. The rates "explain" the
  growth if, between runs with these rates, the gap is smaller than in the short runs for M = 2 and
  4, each in the mean over three seeds by more than {SIGMAS:.0f} standard errors of the difference.
  The verdict on *more training* stays that of the first runs."""
HOW_TO_READ = f"""\
Validation loss in nats per token over the whole validation split, of the weights with which a fit
ends (the mean of the replicas' weights). The gap is the percent above the DDP run of the same seed,
which takes the same tokens in the same steps; ± is the standard deviation over seeds. Settings are
the defaults of `StreamingDiLoCoStrategy`, with the overlap of the bandwidth page ({OVERLAP}). The
default outer learning rate depends on M and H; rows with another one have that of arXiv:2501.18512.
With Muon, the outer step is MuLoCo's (lr 0.7, momentum 0.6, arXiv:2505.23725).
"Outer step" is the gap if the fit ended with an outer step instead of the mean. Replicas are played
in one process by the library's own code, bit for bit equal to separate processes
(`tests/benchmarks/test_size_ladder.py`)."""


def page_lines(records: Records, picture: str) -> list[str]:
    """Return the page as Markdown lines."""
    losses = records.losses
    body = [
        "## Verdicts",
        "",
        *verdicts(losses),
        "",
        "## What counts as success",
        "",
        *SUCCESS.splitlines(),
        "",
        *SUCCESS_OFTEN.splitlines(),
        "",
        "## The runs",
        "",
        *_corpus(),
        f"- a byte-level BPE with {VOCABULARY} tokens, trained on the training text; blocks of"
        f" {BLOCK} tokens",
        "",
        *_sizes(),
        "",
        *HOW_TO_READ.splitlines(),
        "",
        "## Exchanges as often as a link hides",
        "",
        f"{SIZE}, {SHORT} tokens per parameter; each method with its own best rate. At H = {OFTEN},"
        " exchanges take 1.5 % of a replica's time in this GPT-2 ([auto](../auto/result.md)).",
        "",
        *often_table(losses),
        "",
        "## What people would do instead",
        "",
        f"{MODELS[0]}, {SIZE}, {SHORT} tokens per parameter, two ranks; each method with its own"
        " best rate. Real processes train with torch's PowerSGD hook, torch's periodic averager or"
        " torchft, each with the settings that it has in the"
        " [table of times and bytes](../bandwidth/small.md). As after a fit of ours, the mean of"
        " the ranks' weights is evaluated. These runs cannot be interrupted.",
        "",
        *peers_table(losses),
        "",
        "## More tokens in a step",
        "",
        f"H = {OFTEN}, {BATCH_MODEL} at {SEARCHED}, {LONG} tokens per parameter; each method with"
        " its own best rate for each batch.",
        "",
        *batch_table(losses),
        "",
        "## Gap by size, M and H",
        "",
        *_table(records, [cell for cell in _cells(losses) if cell.wire == "fp4"]),
        "",
        "## Other wires",
        "",
        "Percent above the run with the other wire, of the same seed. topk sent the 64 largest of"
        " 4096 values, two bits each, and all replicas gathered them; sparseloco is topk with the"
        " settings of SparseLoCo: error feedback with weight 0.95, outer lr 1 without momentum,"
        " mix 0. The library had topk up to the commits named above. It is now an example without"
        " these details (`examples/topk_codec.py`), and both are no longer run.",
        "",
        *_wires(losses),
        "",
        "## Other settings of the outer step",
        "",
        "Percent above the run with the outer step of arXiv:2501.18512 (lr 0.4, momentum 0.9, mix"
        " 0.5), of the same seed; below 0, the trial is better. The inner learning rate is the one"
        " that is best with the paper's outer step. The library's default for M = 4 and 8 with H ="
        " 100 is the trial with lr 0.8. The one with lr 1.0 is within its uncertainty, and changes"
        " the momentum and mix, too.",
        "",
        *_outer(losses),
        "",
        "## Lion and SignMuon",
        "",
        f"{SEARCHED}, {SHORT} tokens per parameter, on the mean gradient like DDP: one worker, so"
        " there is no vote. Percent above AdamW, of the same seed.",
        "",
        *_lion(losses),
        "",
        "## The paper's models",
        "",
        "arXiv:2501.18512, Tables 5 and 6: C4, 20 tokens per parameter, FP4 with overlap.",
        "",
        *_paper(),
        "",
        "## Learning rates",
        "",
        f"Validation loss with seed 1, H = 100. At {' and '.join(TUNED)} the best rate of the runs"
        f" with {SHORT} tokens per parameter has a worse one on both sides and is used by all runs"
        " of its model, size, optimizer and M. A larger"
        " size takes the rates of the size before, divided by 1.4 for each doubling of the width."
        " 0.2M was first run with such rates too; its search started at them.",
        "",
        *_lr_table(losses),
    ]
    return result_page(TITLE, opening(losses, picture), records.made_by, body)


# -- gaps


def default_cell(
    model: str, size: str, replicas: int, sync_every: int = 100, optimizer: str = "adamw"
) -> Cell:
    """Return a cell of the short runs with default settings; seed and learning rate are open."""
    return Cell(model, size, 1, 0, replicas, sync_every, optimizer=optimizer).default


def paired(losses: Losses, cell: Cell, other: Cell) -> list[float]:
    """Return the percent above another cell with open rate, for each seed that both have."""
    return [percent(losses, ours, theirs) for ours, theirs in pairs(losses, cell, other)]


def gaps(losses: Losses, cell: Cell) -> list[float]:
    """Return the percent above DDP of every seed that has been run, of a cell with open rate."""
    return paired(losses, cell, reference(cell))


def changes_of_trial(losses: Losses, cell: Cell) -> dict[str, list[float]]:
    """Return the percent above the paper's outer step for each model, of all seeds."""
    seeds = sorted({run.seed for run in losses})
    found: dict[str, list[float]] = {}
    for model in MODELS:
        runs = (replace(cell, model=model, seed=seed) for seed in seeds)
        changes = (change_of_trial(losses, run) for run in runs)
        found[model] = [change for change in changes if change is not None]
    return found


def by_model(
    losses: Losses, cell: Cell, other: Callable[[Cell], Cell] = reference
) -> dict[str, list[float]]:
    """Return the percent above another cell for each model, of any number of seeds."""
    cells = {model: replace(cell, model=model) for model in MODELS}
    return {model: paired(losses, each, other(each)) for model, each in cells.items()}


def with_wire(wire: str) -> Callable[[Cell], Cell]:
    """Return a function that gives a cell another wire; SparseLoCo has an outer step of its own."""

    def other(cell: Cell) -> Cell:
        rewired = replace(cell, wire=wire)
        return rewired.default if cell.wire == "sparseloco" else rewired

    return other


def decided(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the models that have been run with three seeds."""
    return {model: values for model, values in found.items() if len(values) >= SEEDS}


def flat(found: dict[str, list[float]]) -> list[float]:
    """Return the values of all models."""
    return [value for values in found.values() for value in values]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def pooled_deviation(losses: Losses) -> float | None:
    """Return s, the standard deviation of a gap over seeds, pooled over all cells."""
    groups = [found for cell in _cells(losses) if len(found := gaps(losses, cell)) > 1]
    if not groups:
        return None
    squares = sum((len(found) - 1) * statistics.variance(found) for found in groups)
    return math.sqrt(squares / sum(len(found) - 1 for found in groups))


def trend(losses: Losses, replicas: int) -> tuple[str, float, float] | None:
    """Return the verdict, the difference in percent, and its standard error; None: too few runs."""
    sizes = [
        found
        for size in NAMES
        if (found := decided(by_model(losses, default_cell("", size, replicas))))
    ]
    s = pooled_deviation(losses)
    models = sizes[0].keys() & sizes[-1].keys() if len(sizes) > 1 else set()
    if not models or s is None:
        return None
    small, large = (flat({model: end[model] for model in models}) for end in (sizes[0], sizes[-1]))
    difference = statistics.mean(large) - statistics.mean(small)
    error = s * math.sqrt(1 / len(small) + 1 / len(large))
    if abs(difference) <= SIGMAS * error:
        return "flat", difference, error
    return ("shrinks" if difference < 0 else "grows"), difference, error


def judged(
    found: dict[str, list[float]], limit: float, words: tuple[str, str] = ("met", "missed")
) -> str:
    """Return the mean over all pairs with its standard error, and the verdict.

    Only models with three seeds count.
    """
    enough = decided(found)
    values = flat(enough)
    if not values:
        return "too few runs"
    mean, error = statistics.mean(values), standard_error(values)
    told = words[mean > limit]
    if abs(mean - limit) <= SIGMAS * error:
        told = "undecided"
    models = f", {', '.join(enough)} only" if len(enough) < len(MODELS) else ""
    return f"{mean:+.2f} % (standard error {error:.2f}{models}): {told}"


# -- text


def opening(losses: Losses, picture: str) -> list[str]:
    """Return the question, the finding and the picture, for the top of the page."""
    return [
        "Replicas that train apart between exchanges may end with a higher loss than data"
        " parallelism on the same tokens. How much higher, and what does that depend on?",
        "",
        *summary(losses),
        "",
        f"![gap to DDP over steps, and over tokens of a replica in a step]({picture})",
        "",
        "Each point is a setting, with the best rates that were searched, over all its seeds;"
        " filled: H = 10 or 20. Lines: more training. Crosses: arXiv:2503.09799 at 35M, H = 30; its"
        f" batch there is not stated, and {PAPER_BATCH:,} tokens, the smallest of its sweep, are"
        " assumed.",
    ]


def verdicts(losses: Losses) -> list[str]:
    """Return a line for each question that the runs so far decide, or do not decide yet."""
    lines = [
        *findings(losses),
        *_disagreement(losses),
        *_more_training(losses),
        *_rates_of_longer_runs(losses),
    ]
    lines += [_finding(losses, m) for m in REPLICAS]
    if all(trend(losses, m) is None for m in REPLICAS):
        lines.append(
            "- **Whether the gap shrinks with size is open:** only one size has three seeds."
        )
    lines += _wire_findings(losses)
    lines += [_muon(losses, tokens) for tokens in (SHORT, LONG)]
    lines += _muon_with_a_larger_batch(losses)
    lines += _outer_findings(losses) + _local_sgd_findings(losses)
    lines += _mixed_mean_findings(losses)
    s = pooled_deviation(losses)
    if s is not None:
        lines.append(
            f"- One run's gap has a standard deviation of s = {s:.2f} %. With three seeds of two"
            f" models, gaps above {SIGMAS * s / math.sqrt(RUNS):.2f} % differ from 0, and"
            f" differences above {SIGMAS * s * math.sqrt(2 / RUNS):.2f} % are resolved. Runs of the"
            " same seed with other settings of DiLoCo are compared in pairs, which resolves more."
        )
    return lines


def _disagreement(losses: Losses) -> list[str]:
    """Return our gaps at the smallest size beside the papers' at 35M, and what more cycles do."""
    found = [decided(by_model(losses, default_cell("", SEARCHED, m))) for m in REPLICAS]
    if not all(found):
        return []
    ours = ", ".join(f"{statistics.mean(flat(of_m)):+.1f}" for of_m in found)
    return [
        f"- **This disagrees with the papers.** At {SEARCHED} and H = 100 the loss is {ours} %"
        " above DDP's with M = 1, 2, 4, 8. At 35M, arXiv:2503.09799 has -0.1, +0.7, +2.0, +3.9 %"
        " (H = 30) and arXiv:2501.18512 +1.4 and +3.7 % (M = 2, 4, H = 100). Here, a replica takes"
        " 128 to 1,024 tokens in a step, and 773 or 858 steps; in the papers, thousands of both."
    ]


def _more_training(losses: Losses) -> list[str]:
    """Return what more training does to the gap, and the verdict once all its runs are done."""
    ends = list(_longer(losses))
    if not ends:
        return [f"- More training: the runs of {LONG} tokens per parameter are not done."]
    told = ""
    changes = [_changes_with_training(losses, *each) for each in product(MODELS, MORE_TRAINING)]
    if min(map(len, changes)) >= SEEDS:
        told = f"at {SEARCHED} the gap {'closes' if _smaller(changes) else 'does not close'}. "
    return [
        f"- **Found, more training, H = 100:** {told}With {LONG} tokens per parameter instead of"
        f" {SHORT} it goes {', '.join(ends)}."
    ]


def _rates_of_longer_runs(losses: Losses) -> list[str]:
    """Return whether the learning rates explain that a gap is larger after more training."""
    changes = [_changes_with_training(losses, GROWING, m, with_own_rate) for m in MORE_TRAINING]
    if min(map(len, changes)) < SEEDS:
        return []
    texts = []
    for m in MORE_TRAINING:
        long = replace(default_cell(GROWING, SEARCHED, m), tokens_per_parameter=LONG)
        found = [
            percent(losses, *runs) for runs in pairs(losses, long, reference(long), with_own_rate)
        ]
        texts.append(f"{mean_text(found, '+.1f', ' %')} with M = {m}")
    told = "explain" if _smaller(changes) else "do not explain"
    return [
        f"- **Found, rates of longer runs:** with rates searched at {LONG} tokens per parameter the"
        f" gap of {GROWING} at {SEARCHED} is {', '.join(texts)}: the rates {told} its growth."
    ]


def _smaller(changes: Sequence[Sequence[float]]) -> bool:
    """Return whether every gap has become smaller, by more than its noise."""
    return all(statistics.mean(of) < -SIGMAS * standard_error(of) for of in changes)


def _changes_with_training(
    losses: Losses, model: str, replicas: int, with_rate: WithRate = row
) -> list[float]:
    """Return what more training adds to the gap at the smallest size, for each seed.

    The longer runs have the rate of `with_rate`.
    """
    short = default_cell(model, SEARCHED, replicas)
    long = replace(short, tokens_per_parameter=LONG)
    before, after = (
        {
            ours.seed: percent(losses, ours, ddp)
            for ours, ddp in pairs(losses, cell, reference(cell), rate)
        }
        for cell, rate in ((short, row), (long, with_rate))
    )
    return [after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())]


def _longer(losses: Losses) -> Iterator[str]:
    """Yield what more training does to the gap, by size, M and model."""
    for size, m in product(NAMES, REPLICAS):
        short = default_cell("", size, m)
        before = by_model(losses, short)
        for model, gap in by_model(losses, replace(short, tokens_per_parameter=LONG)).items():
            if gap and before[model]:
                cycles = Cell(model, size, 1, 0, tokens_per_parameter=LONG).steps // 100
                seeds = "1 seed" if len(gap) == 1 else f"{len(gap)} seeds"
                yield (
                    f"from {statistics.mean(before[model]):+.1f} to {statistics.mean(gap):+.1f} %"
                    f" ({model}, {size}, M = {m}, {cycles} cycles, {seeds})"
                )


def _finding(losses: Losses, replicas: int) -> str:
    """Return the gap of M replicas by size, and the verdicts that the runs so far allow."""
    sizes = {size: by_model(losses, default_cell("", size, replicas)) for size in NAMES}
    texts = [_gap_at(size, found) for size, found in sizes.items() if flat(found)]
    if not texts:
        return f"- M = {replicas}: not run yet."
    line = f"- **Found, M = {replicas}, H = 100:** {', '.join(texts)} from DDP."
    enough = {size: gap for size, found in sizes.items() if (gap := flat(decided(found)))}
    if enough and replicas in TARGETS:
        largest, gap = list(enough.items())[-1]
        told = "met" if statistics.mean(gap) <= TARGETS[replicas] else "missed"
        line += f" Target at {largest}, +{TARGETS[replicas]} %: {told}."
    found_trend = trend(losses, replicas)
    if found_trend is not None:
        verdict, difference, error = found_trend
        line += f" The gap {'is flat' if verdict == 'flat' else verdict} with size"
        line += f" ({difference:+.2f} ± {error:.2f} points)."
    if len(enough) > 1 and len(decided(sizes[next(reversed(enough))])) == len(MODELS):
        line += f" By model: {'; '.join(_by_size(model, sizes) for model in MODELS)}."
    return line


def _by_size(model: str, sizes: dict[str, dict[str, list[float]]]) -> str:
    """Return the mean gaps of a model, from the smallest to the largest size with three seeds."""
    means = [statistics.mean(found[model]) for found in sizes.values() if model in decided(found)]
    return f"{model} {' to '.join(f'{mean:+.2f}' for mean in means)} %"


def _gap_at(size: str, found: dict[str, list[float]]) -> str:
    """Return the mean gap at a size, and which models and runs it rests on."""
    enough = decided(found)
    shown = enough or {model: values for model, values in found.items() if values}
    cycles = min(Cell(model, size, 1, 0).steps // 100 for model in shown)
    note = ""
    if not enough:
        note = f"; {len(flat(found))} of {RUNS} runs ({', '.join(shown)}), no verdict"
    elif len(enough) < len(MODELS):
        note = f"; only {', '.join(enough)}"
    return f"{mean_text(flat(shown), '+.2f', ' %')} at {size} ({cycles} cycles of H{note})"


def _wire_findings(losses: Losses) -> list[str]:
    """Return the verdicts on int2 and topk at the H of their targets."""
    lines = []
    for wire, every in (("int2", 100), ("topk", 30)):
        other, limit = next(target[1:] for target in WIRE_TARGETS if target[0] == wire)
        for tokens in (SHORT, LONG):
            texts = []
            for m in (2, 4):
                cell = replace(
                    default_cell("", SEARCHED, m, every), wire=wire, tokens_per_parameter=tokens
                )
                found = by_model(losses, cell, with_wire(other))
                texts.append(f"M = {m} {judged(found, limit)}")
            lines.append(
                f"- **Found, {wire} against {other}, H = {every}, {tokens} tokens per parameter:**"
                f" {'; '.join(texts)} (target: at most +{limit} %)."
            )
    return lines


def _muon(losses: Losses, tokens: int) -> str:
    """Return the verdict on Muon's gap beside AdamW's."""
    muon, adamw = (
        by_model(losses, replace(cell, tokens_per_parameter=tokens))
        for name in ("muon", "adamw")
        for cell in [default_cell("", SEARCHED, 4, optimizer=name)]
    )
    models = [model for model in decided(muon) if model in decided(adamw)]
    head = f"Muon, M = 4, H = 100, {tokens} tokens per parameter"
    if not models:
        return f"- {head}: too few runs."
    gaps_of_muon = [gap for model in models for gap in muon[model]]
    ours = statistics.mean(gaps_of_muon)
    theirs = statistics.mean(gap for model in models for gap in adamw[model])
    told = "met" if ours <= MUON_TARGET * theirs else "missed"
    return (
        f"- **Found, {head}:** {mean_text(gaps_of_muon, '+.2f', ' %')} from DDP with"
        f" Muon ({', '.join(models)}), {ours / theirs:.2f} times AdamW's gap. Target,"
        f" at most {MUON_TARGET}: {told}."
    )


def _muon_with_a_larger_batch(losses: Losses) -> list[str]:
    """Return the verdict on Muon's gap beside AdamW's where replicas take more tokens in a step."""
    cell = batch_cell(4, BATCHES[-1])
    adamw, muon = (
        gaps_of(losses, replace(cell, optimizer=name).default) for name in ("adamw", "muon")
    )
    if min(len(adamw), len(muon)) < 3:
        return []
    share = statistics.mean(muon) / statistics.mean(adamw)
    told = "met" if share <= MUON_TARGET else "missed"
    head = f"Muon, M = 4, H = {OFTEN}, {LONG} tokens per parameter, batch x {BATCHES[-1]}"
    return [
        f"- **Found, {head}:** {mean_text(muon, '+.2f', ' %')} from DDP with Muon"
        f" ({cell.model}, {cell.size}), {share:.2f} times AdamW's gap. Target, at most"
        f" {MUON_TARGET}: {told}."
    ]


def _local_sgd_findings(losses: Losses) -> list[str]:
    """Return what the plain mean of weights loses against the default outer step."""
    texts = []
    for m in LOCAL_SGD_REPLICAS:
        runs = {model: local_sgd_pairs(losses, model, m) for model in MODELS}
        found = {
            model: [percent(losses, *each) for each in of_model] for model, of_model in runs.items()
        }
        if decided(found):
            texts.append(f"M = {m} {judged(found, 0.0, ('wins', 'loses'))}")
    what = f"local SGD against the default outer step, H = {OFTEN}, {SIZE}"
    note = (
        f"Both overlap {OVERLAP} steps, and a landing with mix 0 discards the steps since its"
        " launch. Local SGD that waits for its exchange is below, under what people would do"
        " instead."
    )
    return [f"- **Found, {what}:** {'; '.join(texts)}. {note}"] if texts else []


def _mixed_mean_findings(losses: Losses) -> list[str]:
    """Return what the mean of weights loses against the default outer step if none is discarded."""
    texts = []
    for batch in BATCHES:
        runs = {str(m): mixed_mean_pairs(losses, m, batch) for m in MIXED_MEAN_REPLICAS}
        found = {m: [percent(losses, *each) for each in of_m] for m, of_m in runs.items()}
        if len(decided(found)) == len(found):
            by_m = ", ".join(
                f"{mean_text(gaps, '+.2f', ' %')} with M = {m}" for m, gaps in found.items()
            )
            told = judged(found, 0.0, ("wins", "loses"))
            texts.append(f"batch x {batch}: {told} ({by_m})")
    what = f"mean with mix 0.5 against the default outer step, H = {OFTEN}, {SEARCHED}"
    return [f"- **Found, {what}:** {'; '.join(texts)}."] if texts else []


def _outer_findings(losses: Losses) -> list[str]:
    """Return the trials of the outer step that have been run with all seeds."""
    texts = []
    for trial, m in product(TRIALS, (4, 8)):
        cell = replace(default_cell("", SEARCHED, m), **trial)
        found = changes_of_trial(losses, cell)
        if decided(found):
            settings = ", ".join(f"{name} {value}" for name, value in trial.items())
            told = judged(found, 0.0, ("wins", "loses"))
            texts.append(f"{settings}, M = {m}: {told}")
    if not texts:
        return ["- Other outer steps: too few runs."]
    return [f"- **Found, outer step against the paper's:** {'; '.join(texts)}."]


def _corpus() -> list[str]:
    recipe = json.loads(RECIPE.read_text())
    train, validation = (recipe[name] for name in ("train", "validation"))
    packages = ", ".join(
        f"{package['name']} {package['version']} ({package['license']})"
        for package in recipe["packages"]
    )
    return [
        f"- text: the documentation in Debian's {packages}, by"
        f" `python -m benchmarks.size_ladder.corpus`: {train['bytes'] / 1e6:.1f} MB in"
        f" {train['documents']:,} documents for training, {validation['bytes'] / 1e6:.1f} MB in"
        f" {validation['documents']:,} for validation; SHA-256 of the training text"
        f" {train['sha256'][:16]}"
    ]


def _sizes() -> list[str]:
    lines = [
        "| size | model | parameters | width | layers | tokens per step |"
        f" steps (cycles of H = 100), {SHORT} tokens per parameter | {LONG} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, size in SIZES.items():
        for model in MODELS:
            cells = (Cell(model, name, 1, 0, tokens_per_parameter=long) for long in (SHORT, LONG))
            steps = [f"{cell.steps:,} ({cell.steps // 100})" for cell in cells]
            lines.append(
                f"| {name} | {model} | {size.parameters(model):,} | {size.width} | {size.layers}"
                f" | {size.blocks * BLOCK:,} | {' | '.join(steps)} |"
            )
    return lines


def _cells(losses: Losses) -> list[Cell]:
    """Return the measured DiLoCo cells, but no trials, with seed 1 and open learning rate."""
    runs = (cell for cell in losses if cell.replicas and cell.sync_every >= 30)
    found = {replace(cell, seed=1, rung=0) for cell in runs}
    outer = {cell: (cell.default, cell.with_papers_outer_step) for cell in found}
    defaults = [cell for cell in found if cell in outer[cell]]
    # the searches have other rates than the table
    shown = [cell for cell in defaults if gaps(losses, cell)]
    return sorted(shown, key=_order)


def _order(cell: Cell) -> tuple[int | str | float, ...]:
    place = NAMES.index(cell.size), cell.tokens_per_parameter, cell.sync_every, cell.replicas
    return *place, cell.model, cell.optimizer, cell.wire, *cell.outer


def _table(records: Records, cells: Sequence[Cell]) -> list[str]:
    lines = [
        "| size | tokens per parameter | H | M | outer lr | model | optimizer | seeds | DDP |"
        " DiLoCo | gap | outer step |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_row(records, cell) for cell in cells]


def _row(records: Records, cell: Cell) -> str:
    losses = records.losses
    runs = pairs(losses, cell, reference(cell))
    outer = [  # runs that were made as trials have no such loss
        100 * (records.outer_step[ours] / losses[ddp] - 1)
        for ours, ddp in runs
        if ours in records.outer_step
    ]
    return (
        f"| {cell.size} | {cell.tokens_per_parameter} | {cell.sync_every} | {cell.replicas}"
        f" | {cell.outer_lr} | {cell.model} | {cell.optimizer} | {len(runs)}"
        f" | {mean_text([losses[ddp] for _, ddp in runs], '.4f')}"
        f" | {mean_text([losses[ours] for ours, _ in runs], '.4f')}"
        f" | {mean_text(gaps(losses, cell), '+.2f', ' %')} | {mean_text(outer, '+.2f', ' %')} |"
    )


def _wires(losses: Losses) -> list[str]:
    lines = [
        "| wire | against | size | tokens per parameter | H | M | outer lr |"
        f" {' | '.join(MODELS)} | both | target |",
        "|" + "---|" * (9 + len(MODELS)),
    ]
    for wire, other, limit in WIRE_TARGETS:
        cells = {replace(cell, model="") for cell in _cells(losses) if cell.wire == wire}
        for cell in sorted(cells, key=_order):
            found = by_model(losses, cell, with_wire(other))
            if flat(found):
                lines.append(
                    f"| {wire} | {other} | {cell.size} | {cell.tokens_per_parameter}"
                    f" | {cell.sync_every} | {cell.replicas} | {cell.outer_lr}"
                    f" | {_by_model_text(found)}"
                    f" | {judged(found, limit)} | +{limit} % |"
                )
    return lines


def _outer(losses: Losses) -> list[str]:
    lines = [
        f"| {' | '.join(OUTER)} | tokens per parameter | H | M | {' | '.join(MODELS)} | both |",
        "|" + "---|" * (len(OUTER) + 4 + len(MODELS)),
    ]
    runs = {replace(cell, model="", seed=1, rung=0) for cell in losses}
    for cell in sorted(filter(_is_trial, runs), key=_order):
        found = changes_of_trial(losses, cell)
        if not flat(found):
            continue
        lines.append(
            f"| {' | '.join(map(str, cell.outer))} | {cell.tokens_per_parameter}"
            f" | {cell.sync_every} | {cell.replicas}"
            f" | {_by_model_text(found)} | {judged(found, 0.0, ('wins', 'loses'))} |"
        )
    return lines


def _is_trial(cell: Cell) -> bool:
    plain = cell.wire == "fp4" and cell.optimizer == "adamw" and cell.size == SEARCHED
    often = cell.sync_every == OFTEN  # has findings of its own
    return plain and cell.replicas > 0 and not often and cell != cell.with_papers_outer_step


def _lion(losses: Losses) -> list[str]:
    lines = [f"| optimizer | {' | '.join(MODELS)} |", "|" + "---|" * (1 + len(MODELS))]
    for optimizer in ("lion", "sign_muon"):
        cell = default_cell("", SEARCHED, 0, optimizer=optimizer)
        found = by_model(losses, cell, lambda cell: replace(cell, optimizer="adamw"))
        lines.append(f"| {optimizer} | {_by_model_text(found)} |")
    return lines


def _by_model_text(found: dict[str, list[float]]) -> str:
    return " | ".join(mean_text(found[model], "+.2f", " %") for model in MODELS)


def _paper() -> list[str]:
    names = [f"M = {m}, H = {every}" for m, every in PAPER_CELLS]
    lines = [f"| parameters | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for millions in PAPER:
        texts = [f"{gap:+.1f} %" for gap in _paper_gaps(millions)]
        lines.append(f"| {millions}M | {' | '.join(texts)} |")
    return lines


def _paper_gaps(millions: int) -> list[float]:
    ddp, *others = PAPER[millions]
    return [100 * (loss / ddp - 1) for loss in others]


def _lr_table(losses: Losses) -> list[str]:
    lines = [
        "| size | tokens per parameter | model | optimizer | method | learning rate: loss | used |",
        "|---|---|---|---|---|---|---|",
    ]
    methods = product(NAMES, (SHORT, LONG), MODELS, OPTIMIZERS, (0, *REPLICAS))
    runs = defaultdict(list)
    for run in losses:
        runs[replace(run, rung=0)].append(run)
    for size, tokens, model, optimizer, m in methods:
        short = default_cell(model, size, m, optimizer=optimizer)
        cell = replace(short, tokens_per_parameter=tokens)
        tried = sorted(runs[cell], key=lambda run: run.rung)
        if len(tried) < 2:
            continue
        rates = ", ".join(f"{lr_of(run.rung)}: {losses[run]:.4f}" for run in tried)
        used = row(losses, cell)
        lines.append(
            f"| {size} | {tokens} | {model} | {optimizer} | {f'M = {m}' if m else 'DDP'} | {rates}"
            f" | {MISSING if used is None else lr_of(used.rung)} |"
        )
    return lines


# -- figure
