"""A comparison: its jobs run, its page written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
    """Run the jobs that are not done yet, and write page and figure.

    Args:
        plan: of the comparison.
        words: overrides of the job; the comparison's own among them are left out.
        command: makes the page again.
        console: where to print.

    Returns:
        The number of jobs that failed.

    Raises:
        ValueError: something that was asked for is not legal. Before anything is run.
        LaboratoryUnavailable: there is a bandwidth, and this machine has no laboratory. Likewise.
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
    """Return what `conf/compare.yaml` asks for; see `Plan` for `folder` and `config_dir`.

    Raises:
        ValueError: a value has the wrong kind or lies outside its range.
    """
    names, overrides = cfg.strategies, OmegaConf.to_container(cfg.overrides)
    if not OmegaConf.is_list(names):
        raise ValueError(f"`strategies={names}` must be a list: 'strategies=[ddp,domino_tp]'.")
    assert isinstance(overrides, dict), "Hydra lets no other kind take its place"
    settings_by_name = {str(name): settings for name, settings in overrides.items()}
    for name, settings in settings_by_name.items():
        if settings is not None and not isinstance(settings, dict):
            raise ValueError(
                f"`overrides.{name}={settings}` must give keys their values:"
                f" 'overrides.{name}={{optimizer.lr:5e-4}}'."
            )
    minutes = cfg.timeout_minutes
    if minutes is not None and not (isinstance(minutes, int | float) and minutes > 0):
        raise ValueError(f"`timeout_minutes={minutes}` must be a number above 0, or null for none.")
    if not isinstance(cfg.nodes, int):
        raise ValueError(f"`nodes={cfg.nodes}` must be a whole number.")
    return Plan(
        strategies=tuple(names),
        bandwidth=cfg.bandwidth,
        nodes=cfg.nodes,
        timeout_s=None if minutes is None else 60.0 * minutes,
        overrides={name: settings or {} for name, settings in settings_by_name.items()},
        folder=folder,
        config_dir=config_dir,
    )
