"""Run the jobs of a comparison and write its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from recipes.comparison.figures import write_png
from recipes.comparison.jobs import Plan, build_jobs
from recipes.comparison.outcome import read_outcome
from recipes.comparison.page import lead, table, title, write_html
from recipes.comparison.running import check_laboratory, run_all

PAGE_FILE = "comparison.html"
FIGURE_FILE = "comparison.png"


def compare(plan: Plan, words: Sequence[str], command: str, console: Console) -> int:
    """Run the unfinished jobs, and write page and figure.

    Args:
        plan: of the comparison.
        words: overrides of the command line; the comparison's own are ignored here.
        command: that reproduces the page.
        console: where to print.

    Returns:
        The number of jobs that failed.

    Raises:
        ValueError: the plan is not legal.
        LaboratoryUnavailable: there is a bandwidth, but no network laboratory on this machine.
    """
    jobs = build_jobs(plan, words)
    check_laboratory(plan)
    records = run_all(jobs, plan, console)
    outcomes = [read_outcome(job, record) for job, record in zip(jobs, records, strict=True)]
    page, figure = plan.folder / PAGE_FILE, plan.folder / FIGURE_FILE
    write_html(outcomes, plan, command, page)
    write_png(outcomes, title(outcomes), figure)
    console.print(lead(outcomes, plan), markup=False, highlight=False)
    console.print(table(outcomes, plan))
    text = f"page:   {page}\nfigure: {figure}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return sum(outcome.measured is None for outcome in outcomes)


def read_plan(cfg: DictConfig, folder: Path, config_dir: str | None = None) -> Plan:
    """Return the plan in a checked configuration; `Plan` documents the other arguments."""
    overrides = cast("dict[str, Any]", OmegaConf.to_container(cfg.overrides))
    return Plan(
        strategies=tuple(cfg.strategies),
        bandwidth=cfg.bandwidth,
        nodes=cfg.nodes,
        timeout_s=None if cfg.timeout_minutes is None else 60.0 * cfg.timeout_minutes,
        overrides={name: settings or {} for name, settings in overrides.items()},
        folder=folder,
        config_dir=config_dir,
    )
