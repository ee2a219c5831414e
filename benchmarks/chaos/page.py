"""The figures of all methods, and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.chaos.events import KILL, KILLS, Event
from benchmarks.chaos.goodput import (
    Curve,
    all_out,
    available_s,
    longest_standstill,
    losses,
    moving_mean,
    outages,
    seconds_to,
    useful_steps,
)
from benchmarks.chaos.job import TERM_S, Outcome
from benchmarks.chaos.plan import LEAST, METHODS, OURS, REPLICAS, RESTARTED, Plan
from lightning_commfree.comm.text import counted

TITLE = "How much training is left when replicas are killed, stopped and cut off?"
LEAST_GOODPUT = 0.95
MOST_SECONDS = 1.05
PUBLISHED = "published for nanoGPT on 4 ranks: DDP 1.9, torchft's DiLoCo 1.16"


class Figures(NamedTuple):
    """What is found of a method."""

    rate: float  # steps per second and replica, undisturbed
    goodput: float
    share: float  # of the steps of three undisturbed replicas
    standstill_s: float
    started_again: int  # processes
    target: float | None  # validation loss; None: the run was too short
    calm_s: float | None  # seconds to it
    rough_s: float | None  # None: not reached
    others_first: bool  # whether other events than kills came before it
    all_lost: bool  # no replica was left, and the method has no files

    @property
    def ratio(self) -> float | None:
        """Seconds to the target with kills over undisturbed."""
        if self.calm_s is None or self.rough_s is None:
            return None
        return self.rough_s / self.calm_s


class Runs(NamedTuple):
    """The two runs of a method, with their validation losses."""

    calm: Outcome
    rough: Outcome
    calm_curve: Curve
    rough_curve: Curve


def undisturbed_rate(calm: Outcome) -> float:
    """Return the steps per second of one replica."""
    return useful_steps(calm.logs, calm.window, calm.alive) / (REPLICAS * calm.window.seconds)


def figures_of(method: str, runs: Runs) -> Figures:
    """Return the figures of a method."""
    calm, rough = runs.calm, runs.rough
    rate = undisturbed_rate(calm)
    useful = useful_steps(rough.logs, rough.window, rough.alive)
    out = outages(rough.logs, rough.events, rough.window)
    means = moving_mean(runs.calm_curve)
    target = means[-1][1] if means else None
    rough_s = None if target is None else seconds_to(runs.rough_curve, target)
    others = [event.at_s for event in rough.events if event.kind != KILL]
    return Figures(
        rate,
        useful / (rate * available_s(out, rough.window)),
        useful / (rate * REPLICAS * rough.window.seconds),
        longest_standstill(rough.logs, out, rough.window),
        sum(map(len, rough.logs.values())) - REPLICAS,
        target,
        None if target is None else seconds_to(runs.calm_curve, target),
        rough_s,
        rough_s is not None and any(at_s < rough_s for at_s in others),
        method not in RESTARTED and all_out(out),
    )


def criteria(found: Mapping[str, Figures]) -> list[str]:
    """Return the criteria, set before the run, as Markdown lines."""
    rows = []
    for method in OURS:
        ours = found.get(method)
        goodput = None if ours is None else ours.goodput
        ratio = None if ours is None else ours.ratio
        rows += [
            (
                f"goodput of {method}",
                "none" if goodput is None else f"{100 * goodput:.1f} %",
                f"at least {100 * LEAST_GOODPUT:.0f} %",
                goodput is not None and goodput >= LEAST_GOODPUT,
            ),
            (
                f"seconds of {method} to the target loss with {KILLS} kills, over undisturbed",
                "not reached" if ratio is None else f"{ratio:.2f}",
                f"at most {MOST_SECONDS:g} ({PUBLISHED})",
                ratio is not None and ratio <= MOST_SECONDS,
            ),
        ]
    lines = ["| criterion | value | bound | verdict |", "|---|---|---|---|"]
    return [*lines, *(f"| {n} | {v} | {b} | {'met' if m else 'missed'} |" for n, v, b, m in rows)]


def table(found: Mapping[str, Figures]) -> list[str]:
    """Return the figures of all methods as Markdown lines."""
    lines = [
        "| | goodput | of three undisturbed replicas | longest standstill of a survivor |"
        " processes started again | steps/s, undisturbed | target loss | seconds to it,"
        f" undisturbed | with {KILLS} kills | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method, f in found.items():
        late = "\\*" if f.others_first else ""
        lost = "†" if f.all_lost else ""
        cells = [
            method,
            f"{100 * f.goodput:.1f} %{lost}",
            f"{100 * f.share:.1f} %{lost}",
            f"{f.standstill_s:.1f} s",
            str(f.started_again),
            f"{f.rate:.2f}",
            "-" if f.target is None else f"{f.target:.3f}",
            "-" if f.calm_s is None else f"{f.calm_s:.1f}",
            "not reached" if f.rough_s is None else f"{f.rough_s:.1f}{late}",
            "-" if f.ratio is None else f"{f.ratio:.2f}{late}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if any(f.others_first for f in found.values()):
        lines += ["", "\\* Events other than kills came before the target was reached."]
    if any(f.all_lost for f in found.values()):
        lines += ["", "† Too high: no replica was left at some time, and its steps are lost."]
    return lines


def opening(found: Mapping[str, Figures], failures: Mapping[str, str], picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    by_goodput = sorted(found.items(), key=lambda item: -item[1].goodput)
    shown = ", ".join(f"{method} {100 * f.goodput:.1f} %" for method, f in by_goodput)
    return [
        "Three replicas train a small GPT-2 while processes are killed, stopped and cut off, at"
        " the same seeded times for each of several methods. How many of the steps that the"
        " survivors could have taken are in the model?",
        "",
        f"**Found:** goodput {shown}.",
        "",
        *criteria(found),
        "",
        *table(found),
        *(line for m, text in failures.items() for line in ("", f"{m} has no figures: {text}")),
        "",
        f"![position in the fit and validation loss over time]({picture})",
    ]


def loss_of(method: str, one: Runs, rate: float) -> str:
    """Return a sentence that says where a method of ours loses its seconds."""
    run = one.rough
    out = outages(run.logs, run.events, run.window)
    found = losses(run.logs, out, run.window, run.alive, rate)
    available = available_s(out, run.window)
    lost = available - useful_steps(run.logs, run.window, run.alive) / rate
    return (
        f"*Where {method} loses {lost:.1f} of {available:.0f} available replica-seconds*: new"
        f" processes wait {found.joining_s:.1f} s between building the model and their first step;"
        f" replicas stand still for {found.still_s:.1f} s; {found.unsent_s:.1f} s are steps that a"
        " process had not sent when it ended. The rest are slower steps, such as those while"
        " another process imports on the same cores."
    )


def body(
    runs: Mapping[str, Runs], plan: Plan, rate: str, seed: int, save_s: float, planned: list[Event]
) -> list[str]:
    """Return method, definitions and timelines."""
    lines = [
        "## Method",
        "",
        f"Three replicas of the GPT-2 of `make demo`, each in a network namespace behind a link of"
        f" {rate} (`benchmarks/lab`), on one machine. The forward of a step takes at least"
        f" {plan.step_s:g} s, mostly sleep, so that speed depends little on the machine's cores;"
        f" `OMP_NUM_THREADS=1`. Constant learning rate after warm-up. H = {plan.sync_every} and two"
        f" fragments, in flight for {counted(plan.overlap_steps, 'step')}, for all DiLoCo methods;"
        " our replicas have their default grace, and torchft's a heartbeat timeout of"
        f" {plan.heartbeat_timeout_s:g} s. Every method has an undisturbed run and a disturbed"
        " one.",
        "",
        "- *ElasticDiLoCo*: `ElasticDiLoCoStrategy`; a process that ends is started again at once."
        " The folder is on the disk of the machine; `commfree-store serve` and moto's S3 server run"
        " on a node that nothing happens to.",
        "- *StreamingDiLoCo* and *DDP*: `StreamingDiLoCoStrategy` and Lightning's `DDPStrategy`"
        " under one torchrun with `--max-restarts`, which restarts all processes when one ends;"
        f" they continue from the last checkpoint, saved every {save_s:g} s, and on SIGTERM from"
        " one that is saved then. Rank 0 hosts the store"
        " (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`): the one that torchrun of torch 2.13 hosts keeps"
        " the addresses of dead processes, so restarts fail.",
        "- *torchft DiLoCo*: `torchft.local_sgd.DiLoCo` with its `Manager` and checkpoint transfer,"
        " fp32 on the wire; a process that ends is started again at once. Transfers time out after"
        " 10 s, as in torchft's own tests.",
        "",
        f"With fewer than {LEAST} replicas, the elastic methods and torchft's wait.",
        "",
        f"All methods save a checkpoint every {save_s:g} s. Events, from seed {seed}: three kills,"
        " then the others in random order, so far apart that usually one replica is back before"
        " the next is hit. SIGTERM is followed by SIGKILL after"
        f" {TERM_S:g} s. A late restart waits before it imports anything. A partition cuts one"
        " replica off at the switch, but not from a folder. An outage of the meeting point: the"
        " folder has another name for a while, the process of the TCPStore or of S3 is stopped and"
        " continues, torchft's lighthouse is killed and another one starts on its port; under"
        " torchrun this event has no effect.",
        "",
        "```text",
        *(f"{event.at_s:7.1f} s  {event}" for event in planned),
        "```",
        "",
        "*Goodput*: useful replica-steps over (available seconds times undisturbed steps/s of the"
        " same method).",
        "",
        "*Useful* are steps whose contribution the surviving replicas have, or will get with the"
        " next exchange. Of a process that died, under torchrun these are the steps up to the last"
        " checkpoint (so all replicas lose those after it). Under DiLoCo they are the steps that"
        " were exchanged, in proportion to the fragments that have them. Steps are not useful that"
        " torchft discards because a commit failed, or that a joiner takes before it gets the"
        " others' state.",
        "",
        "*Available*: a replica is out from the event that hits it until its new process has built"
        " its model, or, if its process survives SIGSTOP or a partition by 5 s, until the end of"
        " that. All other time is available to it: pauses and restarts of the others, and the wait"
        " of a new process for its first step. *Of three undisturbed replicas* counts the time in"
        " which a replica is out as well.",
        "",
        "*Target loss*: the validation loss that the method's own undisturbed run ends with,"
        " as a mean over its last three checkpoints; 24 batches of the validation split. Seconds"
        " count from the moment when all replicas train, and are those of the first moving mean of"
        " three checkpoints at or below the target, interpolated.",
        "",
        "One seed and one run of each: the ratio of seconds is uncertain by some percent. All"
        " processes share two cores, so a process that imports slows the others down.",
        "",
        "## Disturbed runs",
    ]
    for method in filter(runs.__contains__, OURS):
        one = runs[method]
        lines[-2:-2] = ["", loss_of(method, one, undisturbed_rate(one.calm))]
    for method, one in runs.items():
        lines += ["", f"### {method}", "", "```text", *one.rough.timeline, "```"]
        if method in RESTARTED:
            lines += ["", "torchrun's own restarts are not listed."]
    return lines


def draw(runs: Mapping[str, Runs], found: Mapping[str, Figures], path: Path) -> None:
    """Write the picture: position in the fit and validation loss, over the seconds of the run."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it keeps global state and may need a display
    position, loss = figure.subplots(2, 1, sharex=True)
    for method, one in runs.items():
        colour = f"C{METHODS.index(method)}"
        begun_s = one.rough.window.begun_s
        for process in (p for replica in one.rough.logs.values() for p in replica):
            rows = process.rows[1:]
            at = [row.at_s - begun_s for row in rows]
            position.plot(at, [row.step / found[method].rate for row in rows], color=colour, lw=1)
        loss.plot(*_split(one.rough_curve), color=colour, label=method)
        loss.plot(*_split(one.calm_curve), color=colour, ls=":", lw=1)
        position.plot([], [], color=colour, label=method)
    one = next(iter(runs.values()))
    for event in one.rough.events:
        for axes in (position, loss):
            axes.axvline(event.at_s, color="0.7", lw=0.8, ls=":")
        position.text(event.at_s, position.get_ylim()[1], event.kind, rotation=40, fontsize=7)
    position.axline((0, 0), slope=1, color="0.8", lw=0.8)
    position.set(ylabel="steps, in seconds of undisturbed training")
    loss.set(ylabel="validation loss (dotted: undisturbed)", xlabel="seconds since all train")
    for axes in (position, loss):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _split(curve: Curve) -> tuple[Sequence[float], Sequence[float]]:
    means = moving_mean(curve)
    return [at for at, _ in means], [value for _, value in means]
