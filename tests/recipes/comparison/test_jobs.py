"""From one command line to one job per strategy: same tokens, own optimizers, nothing lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipes.comparison.jobs import Job, Plan, build_jobs

CONF = Path(__file__).parents[3] / "conf"
ALL = ("ddp", "streaming_diloco", "distributed_lion", "domino_tp")


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def built(
    *words: str,
    strategies: tuple[str, ...] = ALL,
    overrides: dict[str, dict[str, Any]] | None = None,
    bandwidth: str | None = None,
    nodes: int = 2,
) -> dict[str, Job]:
    plan = Plan(strategies, bandwidth, nodes, None, overrides or {}, Path("/folder/name"))
    return {job.name: job for job in build_jobs(plan, words)}


def composed(job: Job) -> Any:
    """What the job's own command line would give."""
    assert job.arguments[:2] == ["-m", "recipes.pretrain"]
    words = [word for word in job.arguments[2:] if not word.startswith("hydra.")]
    return compose("pretrain", words)


def test_all_strategies_get_the_job_and_equally_many_tokens() -> None:
    comparisons = ("strategies=[ddp]", "run_dir=here", "overrides.ddp={seed:2}", "nodes=2")
    jobs = built("model=llama_tiny", "trainer.max_steps=7", *comparisons)
    assert list(jobs) == list(ALL)
    for name, job in jobs.items():
        config = composed(job)
        assert config.strategy == compose("pretrain", [f"strategy={name}"]).strategy
        assert config.model._target_ == "transformers.LlamaConfig"
        assert config.trainer.max_steps == 7
        assert job.tokens_per_step == 2 * 16 * 64
        assert job.arguments[-1] == f"hydra.run.dir=/folder/name/{name}"
    batches = {name: composed(job).data.batch_size for name, job in jobs.items()}
    assert batches == {**dict.fromkeys(ALL, 16), "domino_tp": 32}
    assert jobs["domino_tp"].notes == (
        "Its 2 ranks share one batch of 32 rows, where the data parallel ranks have 16 rows each.",
    )


def test_lion_gets_its_optimizer_and_nothing_that_was_meant_for_another() -> None:
    words = ("optimizer.lr=1", "optimizer.warmup_steps=9", "optimizer.betas=[0,0]", "seed=3")
    jobs = built(*words, strategies=("ddp", "distributed_lion"))
    job = jobs["distributed_lion"]
    optimizer = composed(job).optimizer
    assert optimizer._target_.endswith("lion_cosine")
    assert (optimizer.lr, optimizer.betas, optimizer.warmup_steps) == (1e-3, None, 9)
    assert composed(job).seed == 3
    assert job.notes == (
        "Its optimizer is Lion (`optimizer=distributed_lion`). Not applied to it, because meant for"
        " another: `optimizer.lr=1`, `optimizer.betas=[0,0]`.",
    )
    assert composed(jobs["ddp"]).optimizer.lr == 1


def test_lion_keeps_its_optimizer_under_an_experiment_that_sets_anothers() -> None:
    files = ("data.corpus.train=a", "data.corpus.validation=b", "trainer=cpu", "logger=csv")
    job = built("experiment=gpt2_gpu", *files, strategies=("distributed_lion",))["distributed_lion"]
    optimizer = composed(job).optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.warmup_steps) == (1e-3, None, 1000)
    assert "`optimizer.lr=0.0006`, `optimizer.betas=[0.9, 0.95]`." in job.notes[0]


def test_overrides_of_one_strategy_come_last() -> None:
    own = {
        "distributed_lion": {"optimizer.lr": 5e-4, "optimizer.betas": [0.8, 0.9], "seed": 7},
        "streaming_diloco": {"strategy.wire_dtype": "int8", "strategy.outer_device": None},
    }
    jobs = built("seed=3", strategies=ALL[:3], overrides=own)
    lion = composed(jobs["distributed_lion"])
    assert (lion.optimizer.lr, lion.optimizer.betas, lion.seed) == (5e-4, [0.8, 0.9], 7)
    assert composed(jobs["streaming_diloco"]).strategy.wire_dtype == "int8"
    assert composed(jobs["ddp"]).seed == 3
    assert jobs["streaming_diloco"].notes == (
        "For it alone: `strategy.wire_dtype=int8`, `strategy.outer_device=null`.",
    )


def test_in_the_laboratory_every_node_has_one_rank() -> None:
    jobs = built(bandwidth="100mbit", nodes=3)
    for job in jobs.values():
        trainer = composed(job).trainer
        assert (trainer.devices, trainer.num_nodes) == (1, 3)
        assert job.tokens_per_step == 3 * 16 * 64
    domino = composed(jobs["domino_tp"])
    assert (domino.strategy.tensor_parallel_size, domino.data.batch_size) == (3, 48)


def test_runs_of_a_comparison_share_a_group_of_wandb_and_have_a_tag_each() -> None:
    pair = ("ddp", "distributed_lion")
    words = ("logger=[csv,wandb]", "logger.wandb.tags=[mine]")
    for name, job in built(*words, strategies=pair).items():
        logger = composed(job).logger.wandb
        assert logger.group == "compare-name"
        assert logger.tags == ["mine", name]
        assert logger.name == name
    job = built("logger=wandb", "logger.wandb.group=ours", strategies=("ddp",))["ddp"]
    assert composed(job).logger.wandb.group == "ours"


def test_a_folder_with_odd_letters_reaches_hydra_unchanged() -> None:
    plan = Plan(("ddp",), None, 2, None, {}, Path("/a b/it's=x"))
    [job] = build_jobs(plan, [])
    parsed = OverridesParser.create().parse_override(job.arguments[-1])
    assert parsed.value() == "/a b/it's=x/ddp"


@pytest.mark.parametrize(
    ("words", "asked", "message"),
    [
        ([], {"strategies": ("ddp", "diloco")}, "'diloco' is not a strategy. Legal are ddp, "),
        ([], {"strategies": ("diloco",)}, "Did you mean streaming_diloco?"),
        ([], {"strategies": ("ddp", "ddp")}, "`strategies` names ddp twice"),
        ([], {"strategies": ()}, "leaves nothing to compare. Legal are ddp, "),
        (["strategy=ddp"], {}, "`strategy=ddp` applies to all strategies"),
        (["strategy.sync_every=3"], {}, "'overrides.streaming_diloco={strategy.sync_every:50}'"),
        (["trainer.num_nodes=2"], {}, "trainer.num_nodes=2 asks for other machines"),
        (["trainer=multinode"], {}, "trainer.num_nodes=2 asks for other machines"),
        (["trainer.devices=2"], {"bandwidth": "1gbit"}, "every node has one rank. Set"),
        ([], {"nodes": 3}, "`nodes=3` counts the nodes of the network laboratory"),
        ([], {"overrides": {"ddp": {"data.batch_size": 1}}}, "would train on 2,048 tokens per"),
        (["data.num_workers=-1"], {}, "`data.num_workers=-1` is not legal for recipes.data"),
        ([], {"overrides": {"ddp": {"seed": True}}}, "`seed=true` is not legal"),
        (["experiment=demo"], {}, "`strategy.sync_every` is not a setting of ddp: experiment=demo"),
    ],
)
def test_jobs_that_cannot_be_compared_are_refused(words, asked, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        built(*words, **asked)
