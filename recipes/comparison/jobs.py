"""Derive one job per strategy from one command line, all with the same tokens per step."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_class
from omegaconf import OmegaConf

from lightning_commfree import DistributedLionStrategy, DominoTPStrategy
from recipes.configuration.checking import check_config, nearest
from recipes.training.length import count_ranks

RECIPE = "pretrain"  # module and primary configuration of the job
OWN_KEYS = ("strategies", "bandwidth", "nodes", "timeout_minutes", "overrides", "run_dir")
_ELASTIC = "elastic_diloco"
_LION_OPTIMIZER = "optimizer=distributed_lion"
# keys with the same meaning for every optimizer; other values for AdamW would be wrong for Lion
_COMMON_OPTIMIZER_KEYS = ("total_steps", "warmup_steps", "final_lr_fraction")

Config = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Settings of a comparison, except the job itself.

    Attributes:
        strategies: names of files in `conf/strategy/`; the first is the reference.
        bandwidth: of every node's link, as `tc` writes it; None: all ranks on this machine.
        nodes: number of nodes with one rank each, if there is a bandwidth.
        timeout_s: limit for one job in seconds; None: no limit.
        overrides: for the job of one strategy only, key to value.
        folder: of the page, with a subfolder for each job.
        config_dir: value of `--config-dir`, if given.
    """

    strategies: tuple[str, ...]
    bandwidth: str | None
    nodes: int
    timeout_s: float | None
    overrides: dict[str, Config]
    folder: Path
    config_dir: str | None = None


@dataclass(frozen=True)
class Job:
    """One run of the recipe.

    Attributes:
        name: of the strategy.
        words: overrides for `recipes.pretrain`, without the folder.
        folder: of the run.
        notes: further differences from the other jobs, as sentences for the page.
        tokens_per_step: of all ranks.
        config_dir: value of `--config-dir`, if given.
    """

    name: str
    words: tuple[str, ...]
    folder: Path
    notes: tuple[str, ...]
    tokens_per_step: int
    config_dir: str | None = None

    @property
    def arguments(self) -> list[str]:
        """Arguments of `python` that run the job."""
        flags = config_dir_flags(self.config_dir)
        words = [*self.words, _word("hydra.run.dir", str(self.folder))]
        return ["-m", f"recipes.{RECIPE}", *flags, *words]


def config_dir_flags(config_dir: str | None) -> list[str]:
    """Return the command-line arguments that select a folder of configurations."""
    return [] if config_dir is None else ["--config-dir", config_dir]


def build_jobs(plan: Plan, words: Sequence[str]) -> list[Job]:
    """Compose and check a job for each strategy, without writing anything.

    Args:
        plan: of the comparison.
        words: overrides of the command line; the comparison's own are ignored here.

    Raises:
        ValueError: a strategy is unknown, a common override sets something of one strategy, ranks
            are given twice, tokens per step differ, or a value is not legal.
    """
    check_strategies(plan.strategies)
    common = [word for word in words if _key(word).partition(".")[0] not in OWN_KEYS]
    _check_common(common, plan)
    jobs = [_build_job(plan, name, common) for name in plan.strategies]
    first = jobs[0]
    for job in jobs[1:]:
        if job.tokens_per_step != first.tokens_per_step:
            raise ValueError(
                f"{job.name} would train on {job.tokens_per_step:,} tokens per step and"
                f" {first.name} on {first.tokens_per_step:,}: their losses could not be compared."
                " Give data.batch_size and trainer.* for all strategies, not in `overrides`."
            )
    return jobs


def check_strategies(names: Sequence[str]) -> None:
    """Check that every strategy exists and is named once.

    Raises:
        ValueError: a strategy does not exist or is named twice.
    """
    found = GlobalHydra.instance().config_loader().get_group_options("strategy")
    legal = [name for name in found if name != _ELASTIC]
    listed = f"Legal are {', '.join(legal)}."
    if not names:
        raise ValueError(f"`strategies=[]` leaves nothing to compare. {listed}")
    for name in names:
        if name == _ELASTIC:
            raise ValueError(
                f"`strategies`: {_ELASTIC} cannot be compared, because each of its replicas is a"
                f" command of its own. {listed}"
            )
        if name not in legal:
            near = nearest(str(name), legal)
            hint = f" Did you mean {near}?" if near else ""
            raise ValueError(f"`strategies`: '{name}' is not a strategy. {listed}{hint}")
        if list(names).count(name) > 1:
            raise ValueError(
                f"`strategies` names {name} twice. To compare two settings of one strategy, write"
                " the second into a file strategy/NAME.yaml in a folder of your own, and name that"
                " folder by --config-dir."
            )


def _check_common(words: Sequence[str], plan: Plan) -> None:
    for word in words:
        key = _key(word)
        if key == "strategy" or key.startswith("strategy."):
            raise ValueError(
                f"`{word}` applies to all strategies, but they have no settings in common. Name"
                " them in `strategies=[...]` and give settings to one of them:"
                " 'overrides.streaming_diloco={strategy.sync_every:50}'."
            )
        if plan.bandwidth and key in ("trainer.devices", "trainer.num_nodes"):
            raise ValueError(
                f"`{word}` cannot be combined with a bandwidth: in the network laboratory every"
                " node has one rank. Set their number by nodes=."
            )
    if plan.bandwidth is None and plan.nodes != 2:
        raise ValueError(
            f"`nodes={plan.nodes}` counts the nodes of the network laboratory, which needs a"
            " bandwidth: add bandwidth=100mbit. Without one, set the number of ranks by"
            " trainer.devices=."
        )


def _build_job(plan: Plan, name: str, common: Sequence[str]) -> Job:
    words, notes = [*common, f"strategy={name}"], []
    if plan.bandwidth:
        words += ["trainer.devices=1", f"trainer.num_nodes={plan.nodes}"]
    config = _composed(words)
    _check_shared(name, config, plan)
    kind = get_class(config["strategy"]["_target_"])
    if issubclass(kind, DistributedLionStrategy):
        words, note = _with_lion(words)
        notes.append(note)
    own = [_word(key, value) for key, value in (plan.overrides.get(name) or {}).items()]
    if own or issubclass(kind, DistributedLionStrategy):
        config = _composed([*words, *own])
    if issubclass(kind, DominoTPStrategy):
        more, note = _with_whole_batch(config, plan)
        words += more
        notes.append(note)
        config = _composed([*words, *own])
    words += [*_with_group(config, name, plan.folder), *own]
    check_config(compose(RECIPE, [*words, _word("run_dir", str(plan.folder))]), RECIPE)
    if own:
        notes.append(f"For it alone: {', '.join(f'`{word}`' for word in own)}.")
    return Job(
        name,
        tuple(words),
        plan.folder / name,
        tuple(notes),
        tokens_per_step(config),
        plan.config_dir,
    )


def _check_shared(name: str, config: Config, plan: Plan) -> None:
    """Refuse settings of an experiment or trainer file that a comparison cannot use."""
    if config["experiment"]:
        known = _composed([f"strategy={name}"])["strategy"]
        foreign = [key for key in config["strategy"] if key not in known]
        if foreign:
            raise ValueError(
                f"`strategy.{foreign[0]}` is not a setting of {name}: experiment="
                f"{config['experiment']} sets it for another strategy. Leave the experiment out and"
                " give its other overrides."
            )
    if plan.bandwidth is None and config["trainer"]["num_nodes"] != 1:
        raise ValueError(
            f"trainer.num_nodes={config['trainer']['num_nodes']} asks for other machines, but a"
            " comparison runs all ranks on this one. Use trainer.num_nodes=1, or a bandwidth"
            " and nodes= for the network laboratory."
        )


def _with_lion(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the words with Lion's optimizer in place of another one's settings, and a note."""
    kept: list[str] = []
    dropped: list[str] = []
    for word in words:
        group, _, key = _key(word).partition(".")
        stays = group != "optimizer" or key in _COMMON_OPTIMIZER_KEYS
        (kept if stays else dropped).append(word)
    kept.append(_LION_OPTIMIZER)
    if any(_key(word) == "experiment" for word in words):  # may set optimizer values
        asked, lions = _composed(kept)["optimizer"], _composed([_LION_OPTIMIZER])["optimizer"]
        for key, value in lions.items():
            if key not in _COMMON_OPTIMIZER_KEYS and asked[key] != value:
                dropped.append(_word(f"optimizer.{key}", asked[key]))
                kept.append(_word(f"optimizer.{key}", value))
    note = f"Its optimizer is Lion (`{_LION_OPTIMIZER}`)."
    if dropped:
        listed = ", ".join(f"`{word}`" for word in dropped)
        note += f" Not applied to it, because meant for another: {listed}."
    return kept, note


def _with_whole_batch(config: Config, plan: Plan) -> tuple[list[str], str]:
    """Return overrides that give a tensor-parallel group the batch of all its ranks, and a note."""
    size, words = config["strategy"]["tensor_parallel_size"], []
    if size is None:
        size = _num_ranks(config)
        if plan.bandwidth:  # None means the ranks of a node, of which there is one here
            words = [f"strategy.tensor_parallel_size={size}"]
    batch = config["data"]["batch_size"]
    return [*words, f"data.batch_size={batch * size}"], (
        f"Its {size} ranks share one batch of {batch * size} rows, where the data parallel ranks"
        f" have {batch} rows each."
    )


def _with_group(config: Config, name: str, folder: Path) -> list[str]:
    """Return overrides that put the runs of a comparison into one W&B group, each with a tag."""
    settings = config["logger"]["wandb"]
    if settings is None:
        return []
    group = settings.get("group") or f"compare-{folder.name}"
    tags = [*(settings.get("tags") or []), name]
    values = {"group": group, "tags": tags, "name": settings.get("name") or name}
    return [f"++{_word(f'logger.wandb.{key}', value)}" for key, value in values.items()]


def tokens_per_step(config: Config) -> int:
    """Return the tokens that all ranks together train on in one optimizer step."""
    trainer, data = config["trainer"], config["data"]
    shares = _num_ranks(config)
    if issubclass(get_class(config["strategy"]["_target_"]), DominoTPStrategy):
        shares = max(shares // (config["strategy"]["tensor_parallel_size"] or shares), 1)
    per_batch = shares * data["batch_size"] * data["block_size"]
    return int(per_batch * trainer["accumulate_grad_batches"])


def _num_ranks(config: Config) -> int:
    ranks = count_ranks(config["trainer"])
    return ranks.per_node * ranks.num_nodes


def _composed(words: Sequence[str]) -> Config:
    """Return the parts of the composed job that this module reads, in plain containers."""
    config = compose(RECIPE, list(words), return_hydra_config=True)
    # not as a whole: `run_dir` refers to Hydra's folder, which is the comparison's here
    some = {
        "data": ("batch_size", "block_size"),
        "trainer": ("accelerator", "devices", "num_nodes", "accumulate_grad_batches"),
        "logger": ("wandb",),
    }
    parts: Config = {
        part: {key: config[part].get(key) for key in keys} for part, keys in some.items()
    }
    for part in ("strategy", "optimizer"):
        parts[part] = OmegaConf.to_container(config[part], resolve=True)
    parts["experiment"] = config["hydra"]["runtime"]["choices"].get("experiment")
    return parts


def _key(word: str) -> str:
    return OverridesParser.create().parse_override(word).key_or_group


def _word(key: str, value: Any) -> str:
    """Return an override in Hydra's syntax, quoted if necessary."""
    if isinstance(value, str) and re.fullmatch(r"[\w./+:@-]+", value):
        return f"{key}={value}"
    return f"{key}={json.dumps(value)}"
