"""A model that is larger than memory is refused before any of it is allocated."""

from __future__ import annotations

import re

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from recipes.training import memory
from recipes.training.evaluation import generate_text
from recipes.training.length import Ranks
from recipes.training.memory import estimate, free_host_bytes, gpus_of
from recipes.training.pretraining import build, build_data, build_module
from recipes.training.run import fit

ALL = [0, 1, 2, 3]  # the GPUs of a made-up machine
SMALL = ["data=synthetic", "tokenizer=bytes", "data.corpus.train_characters=5000"]


@pytest.fixture
def needed(compose_config):
    """Return the parameters of a module, its buffers' bytes, and what a run of it needs."""

    def made(*overrides: str, ranks: Ranks | None = None):
        config = compose_config(*SMALL, *overrides)
        with torch.device("meta"):
            module = build_module(config, build_data(config))
        numel = sum(p.numel() for p in module.parameters())
        return numel, estimate(module, config, ranks or Ranks(2, 1))

    return made


def test_ddp_with_adamw(needed) -> None:
    n, need = needed("strategy=ddp")
    assert need.weights == need.gradients == need.strategy == need.host == 4 * n
    assert need.optimizer == 8 * n
    _, alone = needed("strategy=ddp", ranks=Ranks(1, 1))
    assert alone.strategy == 0


def test_diloco_keeps_two_more(needed) -> None:
    n, need = needed("strategy=streaming_diloco")
    assert need.strategy == 8 * n
    assert need.saving == 4 * n, "a save puts the local weights aside"
    assert need.per_rank == 4 * n + 4 * n + 8 * n + 8 * n + 4 * n
    _, shared = needed("strategy=streaming_diloco", "strategy.replica_size=2")
    assert shared.strategy == 4 * n + 4 * n, "half of the outer state, and DDP's buckets"
    _, host = needed("strategy=streaming_diloco", "strategy.outer_device=cpu")
    assert (host.strategy, host.host) == (0, 4 * n + 2 * 8 * n)


OTHER = "{_target_:lightning_commfree.diloco.Int2Codec,error_feedback:0.9}"


@pytest.mark.parametrize("wire", ["int2", OTHER])
def test_error_feedback_keeps_one_more(needed, wire: str) -> None:
    words = ["strategy=streaming_diloco", f"strategy.wire_dtype={wire}"]
    n, need = needed(*words)
    assert need.strategy == 8 * n + 4 * n
    _, shared = needed(*words, "strategy.replica_size=2", "strategy.inside=fsdp")
    assert shared.strategy == 4 * n + 2 * n
    _, host = needed(*words, "strategy.outer_device=cpu")
    assert (host.strategy, host.host) == (4 * n, 4 * n + 2 * 8 * n), "it stays on the device"


@pytest.mark.parametrize("inside", ["fsdp", "{_target_:lightning_commfree.FSDPSettings}"])
def test_fsdp_divides_all_but_its_largest_unit(needed, inside: str) -> None:
    parts = ["strategy=streaming_diloco", "strategy.replica_size=2", f"strategy.inside={inside}"]
    n, need = needed(*parts)
    unit = need.weights - 2 * n
    assert 0 < unit < 4 * n, "the largest unit is whole for a while"
    assert (need.gradients, need.optimizer) == (2 * n + unit, 4 * n)
    assert need.strategy == 4 * n, "half of the outer state, and no buckets"
    assert need.saving == 2 * n
    _, whole = needed(*parts[:2])
    assert need.host == whole.host, "a save puts one tensor together at a time"


@pytest.mark.parametrize(
    "inside", ["domino", "{_target_:lightning_commfree.domino.DominoSettings}"]
)
def test_domino_inside_divides(needed, inside: str) -> None:
    words = ["strategy=streaming_diloco", "strategy.replica_size=2", f"strategy.inside={inside}"]
    n, need = needed(*words)
    assert need.weights == need.gradients == need.saving == 2 * n
    assert (need.optimizer, need.strategy) == (4 * n, 4 * n)


def test_bf16_halves_and_lion_then_keeps_a_master_copy(needed) -> None:
    n, need = needed("strategy=ddp", "trainer.precision=bf16-true")
    assert (need.weights, need.gradients) == (2 * n, 2 * n)
    n, lion = needed(
        "strategy=distributed_lion", "optimizer=distributed_lion", "trainer.precision=bf16-true"
    )
    assert lion.optimizer > need.optimizer


def test_it_is_said_with_numbers_before_anything_is_launched(compose_config, monkeypatch) -> None:
    monkeypatch.setattr(Trainer, "fit", lambda *_, **__: pytest.fail("something was launched"))
    # 34 billion parameters in few tensors
    wide = ["model=llama_tiny", "model.hidden_size=65536", "model.num_hidden_layers=2"]
    config = compose_config(*SMALL, *wide)
    with pytest.raises(ValueError, match=r"The model is larger than memory") as caught:
        fit(config, build)
    assert re.search(
        r"needs at least [\d.]+ TB in the machine's memory for 2 ranks \(per rank weights"
        r" [\d.]+ GB, gradients [\d.]+ GB, optimizer [\d.]+ GB, StreamingDiLoCoStrategy [\d.]+ GB,"
        r" the copy of a save [\d.]+ GB; activations come on top\), but only [\d.]+ \w?B are free"
        r".*domino_tp.*check_memory=false",
        str(caught.value),
    )


def test_a_gpu_is_asked_for_its_own(compose_config, monkeypatch) -> None:
    config = compose_config(*SMALL, "strategy=ddp")
    config["trainer"]["accelerator"] = "gpu"
    monkeypatch.setattr(memory, "count_ranks", lambda _: Ranks(2, 1))
    monkeypatch.setattr(memory, "free_gpu_bytes", lambda devices: 10_000)
    data = build_data(config)
    with pytest.raises(ValueError, match=r"on each GPU .* 10 kB are free"):
        memory.check_memory(config, lambda: build_module(config, data))
    memory.check_memory({**config, "check_memory": False}, lambda: pytest.fail("not wanted"))


def test_a_process_that_will_fork_does_not_touch_cuda(compose_config, monkeypatch) -> None:
    """Its children could not use it: also asking for the state of random numbers begins CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    touch = lambda *_: pytest.fail("CUDA was touched")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", touch)
    monkeypatch.setattr(torch.cuda, "_lazy_init", touch)
    config = compose_config(*SMALL, "strategy=ddp")
    data = build_data(config)
    memory.check_memory(config, lambda: build_module(config, data))
    generate_text(build_module(config, data), data.tokenizer, "a", 2, seed=0)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(2, [0, 1]), (-1, ALL), ("auto", ALL), ("-1", ALL), ("2", [0, 1]), ([1, 3], [1, 3]),
     ("1,3", [1, 3]), ("1,", [1])],
)  # fmt: skip
def test_only_the_gpus_of_the_run_are_asked(devices, expected, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(ALL))
    assert gpus_of(devices) == expected
    with pytest.raises(MisconfigurationException, match=r"requested gpu: \[4\]"):
        gpus_of([4])


def test_a_jobs_limit_counts(monkeypatch, tmp_path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", limit)
    without = free_host_bytes()
    assert without > 1_000_000
    limit.write_text("max\n")
    assert free_host_bytes() > 1_000_000
    limit.write_text("1000000\n")
    assert free_host_bytes() == 1_000_000
