r"""Estimate a run over a slow link before training: utilization, required bandwidth, advice.

Run it from the repository's root; `conf/plan.yaml` says what each key means and in which unit::

    python -m recipes.plan model=llama_1b step_time=0.1 bandwidth=1
    python -m recipes.plan model=gpt2 step_time=0.35 bandwidth=0.1 data.block_size=1024 \
        num_replicas=4 overlap_steps=5

The figures come from a simulation (`commfree_planner`), not from measurements.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from recipes.configuration.application import application


@application("plan")
def main(cfg: DictConfig) -> float:
    """Plan one run; return the utilization of the recommended setting, for Hydra sweepers."""
    # here: importing torch takes seconds, which `--help` does not need
    from rich.console import Console

    from recipes.planning import plan

    logging.getLogger("lightning").setLevel(logging.WARNING)
    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return plan(cast("dict[str, Any]", config), Console()).utilization


if __name__ == "__main__":
    main()
