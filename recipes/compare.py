r"""Compare strategies on your own model and text: run the same job under each, and write a page.

Run it from the repository's root. Keys other than the comparison's own (see `conf/compare.yaml`)
are overrides of the job, as for `recipes.pretrain`::

    python -m recipes.compare trainer.max_steps=500
    python -m recipes.compare 'strategies=[ddp,streaming_diloco]' model=llama_tiny \
        data=text 'data.corpus.train=books/*.txt' data.corpus.validation=held_out.txt
    python -m recipes.compare 'overrides.distributed_lion={optimizer.lr:5e-4}' \
        'overrides.streaming_diloco={strategy.sync_every:50}'
    python -m recipes.compare bandwidth=100mbit nodes=2    # in the network laboratory, as root

Each job runs in its own processes. `run_dir` contains `comparison.html`, `comparison.png` and a
folder per job; the same command with the same `run_dir` keeps the jobs that are done. The exit code
is 1 if a job failed, and 2 if the network laboratory is not available.
"""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from pathlib import Path

from omegaconf import DictConfig

from recipes.configuration.application import application


@application("compare")
def main(cfg: DictConfig) -> None:
    """Run the comparison; exit with 1 if a job failed, with 2 without a laboratory."""
    # here: importing torch and Lightning takes seconds, which `--help` does not need
    from hydra.core.hydra_config import HydraConfig
    from rich.console import Console

    from benchmarks.lab import LaboratoryUnavailable, exit_on_signals
    from recipes.comparison.comparing import compare, read_plan
    from recipes.comparison.jobs import config_dir_flags

    # Trainers that only count ranks would print their devices
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    exit_on_signals()  # so that jobs and laboratory end with this process
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
        print(f"Interrupted. Finished jobs are kept: add {again} to continue.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
