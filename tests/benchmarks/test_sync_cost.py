"""The page about the cost of a sync, at toy size, and the arithmetic behind its figures."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from benchmarks.sync_cost import __main__ as sync_cost
from benchmarks.sync_cost import job as sync_job
from benchmarks.sync_cost.job import MemoryJob, SyncJob
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger, all_gather_bytes
from lightning_commfree.diloco import CODECS

NUMEL, MEMORY_NUMEL = 200_000, 2**22
MOST_AROUND_THE_VALUES = 100  # bytes of a header and of what fills a message up to 8


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "sync_cost.md"
    toy = [f"--numel={NUMEL}", "--rounds=15", f"--memory-numel={MEMORY_NUMEL}", f"--page={path}"]
    name = "replica_size=2"
    with pytest.MonkeyPatch.context() as patch:  # one of them: a job takes seconds to begin
        patch.setattr(sync_cost, "MEMORY_SETTINGS", {name: sync_cost.MEMORY_SETTINGS[name]})
        sync_cost.main(["--replicas", "1", "2", *toy])
    return path.read_text()


def row_of(page: str, name: object) -> list[str]:
    found = re.search(rf"^\| {re.escape(str(name))} \|(.*)\|$", page, re.MULTILINE)
    assert found, page
    return [cell.strip().replace(",", "") for cell in found.group(1).split("|")]


def test_ledger_forecast_and_interface_agree(page: str) -> None:
    """For two replicas: each sends its payload and a header."""
    sent, per_parameter, foretold, crossed, ratio, *_ = row_of(page, 2)
    assert sent == foretold
    payload = CODECS["fp4"].num_bytes(NUMEL)
    around = int(sent) - all_gather_bytes(payload, 2)
    assert 0 < around <= MOST_AROUND_THE_VALUES
    assert float(per_parameter) == pytest.approx(int(sent) / NUMEL, abs=1e-4)
    if sync_cost.why_no_network() is not None:
        assert (crossed, ratio) == ("not counted", "--")
        pytest.skip("a network of its own needs Linux, root, `unshare` and `ip`")
    # headers, and what a busy machine resends; a doubled count would be seen
    assert int(sent) < int(crossed) < 1.6 * int(sent)
    assert float(ratio) == pytest.approx(int(crossed) / int(sent), abs=1e-4)


def test_one_replica_sends_nothing_but_computes(page: str) -> None:
    sent, _, foretold, *_, launch, exchange, land, total = row_of(page, 1)
    assert (sent, foretold) == ("0", "0")
    assert float(launch) > 0 < float(land)
    phases = float(launch) + float(exchange) + float(land)
    assert float(total) == pytest.approx(phases, abs=0.2)  # each is rounded


def test_the_outer_state_is_what_the_design_says(page: str) -> None:
    host, gpu, resident, design = map(float, row_of(page, "replica_size=2"))
    assert host + gpu == design == 4.0
    if not torch.cuda.is_available():
        assert resident == pytest.approx(design, rel=0.3)


def test_the_page_says_how_it_was_made(page: str) -> None:
    assert "- command: `python -m benchmarks.sync_cost --replicas 1 2 --numel=200000" in page
    assert "200,000 parameters, `wire_dtype=fp4`, `check_drift_every=1`." in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="the state would be on the GPU")
def test_memory_without_momentum_is_the_global_copy_alone() -> None:
    """So the sum over storages sees what is there, not what is expected."""
    changes = {"outer_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0)}
    assert sync_job.measure_memory(MemoryJob(1, 1000, changes))["host"] == 4.0


def test_a_sync_moves_the_global_copy_and_leaves_nothing_in_flight() -> None:
    module = nn.ParameterList([torch.zeros(300)])
    diloco = sync_job.start(module, Channel([0], 0, Ledger()), wire_dtype="fp32")
    for landings in (1, 2):
        before = diloco.fragments[0].global_copy.clone()
        cpu_s = sync_job.sync(module, diloco, seed=landings)
        assert tuple(cpu_s) == sync_cost.PHASES
        assert diloco.in_flight == []
        assert diloco.fragments[0].landings == landings
        assert not torch.equal(diloco.fragments[0].global_copy, before)


def test_figures_are_per_replica_and_sync() -> None:
    """Two replicas, four rounds; barriers alone put 200 bytes on the interface in each. TCP sent
    some of one round twice."""
    job = SyncJob(2, 10, 4, {}, own_network=True)
    ranks = [
        {
            "idle_bytes": [200, 200, 9200, 200],
            "interface_bytes": [2200, 3100, 2200, 2200],
            "ledger_bytes": 400 * factor,
            "foretold_bytes": 150,
            "cpu_s": {phase: [9.0, factor, factor] for phase in sync_cost.PHASES},
        }
        for factor in (1, 2)
    ]
    cost = sync_cost.summed_up(job, ranks)
    assert (cost.ledger_bytes, cost.foretold_bytes, cost.interface_bytes) == (150, 150, 1000)
    assert set(cost.cpu_s.values()) == {2.0}
    uncounted = [{**rank, "idle_bytes": None, "interface_bytes": None} for rank in ranks]
    cost = sync_cost.summed_up(job._replace(own_network=False), uncounted)
    assert cost.interface_bytes is None


def test_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sync_cost.main(["--replicas", "0"])
    assert "must all be 1 or more" in capsys.readouterr().err
