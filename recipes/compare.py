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
from pathlib import Path

from omegaconf import DictConfig

from recipes.configuration.application import application


@application("compare")
def main(cfg: DictConfig) -> None:
    """Compare; leave with exit code 1 if a job failed, 2 without a laboratory."""
    # in here: they load torch and Lightning, seconds that `--help` shall not wait for
    from hydra.core.hydra_config import HydraConfig
    from rich.console import Console

    from benchmarks.lab import LaboratoryUnavailable, exit_on_signals
    from recipes.comparison.comparing import compare, read_plan
    from recipes.comparison.jobs import config_dir_flags

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
