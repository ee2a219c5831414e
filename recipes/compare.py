r"""Compare strategies on one's own model and text: the same job under each, and a page about them.

Run it from the repository's root. What is no key of the comparison itself (see
`conf/compare.yaml`) is an override of the job, as `recipes.pretrain` takes it::

    python -m recipes.compare trainer.max_steps=500
    python -m recipes.compare 'strategies=[ddp,streaming_diloco]' model=llama_tiny \
        data=text 'data.corpus.train=books/*.txt' data.corpus.validation=held_out.txt
    python -m recipes.compare 'overrides.distributed_lion={optimizer.lr:5e-4}' \
        'overrides.streaming_diloco={strategy.sync_every:50}'
    python -m recipes.compare bandwidth=100mbit nodes=2    # in the network laboratory, as root

Each job runs in processes of its own. `comparison.html` and `comparison.png` lie in `run_dir`,
beside a folder per job; the same command with the same `run_dir` keeps the jobs that are done. The
exit code is 1 if a job failed, and 2 if the laboratory is not to be had.
"""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from benchmarks.lab import LaboratoryUnavailable, exit_on_signals
from recipes.comparison.figures import write_png
from recipes.comparison.jobs import Plan, build_jobs, config_dir_flags
from recipes.comparison.outcome import read_outcome
from recipes.comparison.page import title, write_html
from recipes.comparison.running import check_laboratory, run_all
from recipes.configuration.application import application

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
    console.print(f"page:   {page}\nfigure: {figure}", markup=False, highlight=False)
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


@application("compare")
def main(cfg: DictConfig) -> None:
    """Compare; leave with exit code 1 if a job failed, 2 without a laboratory."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # of Trainers that count ranks
    exit_on_signals()  # so that the jobs and the laboratory end with us
    words = list(HydraConfig.get().overrides.task)
    runtime = HydraConfig.get().runtime
    folders = [s.path for s in runtime.config_sources if s.provider == "command-line"]
    plan = read_plan(cfg, Path(runtime.output_dir), folders[0] if folders else None)
    flags = config_dir_flags(plan.config_dir)
    command = shlex.join(["python", "-m", "recipes.compare", *flags, *words])
    try:
        failed = compare(plan, words, command, Console())
    except LaboratoryUnavailable as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        again = shlex.quote(f"run_dir={plan.folder}")
        print(f"Interrupted. Jobs that are done are kept: add {again} to go on.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
