"""The sync-cost benchmark: a toy run, and the arithmetic of its figures."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.sync_cost import __main__ as sync_cost
from lightning_commfree.comm.ledger import all_gather_bytes
from lightning_commfree.diloco import CODECS

NUMEL, MEMORY_NUMEL = 200_000, 2**22
MOST_OVERHEAD = 100  # bytes of the header, and of padding to multiples of 8


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "sync_cost.md"
    toy = [f"--numel={NUMEL}", "--rounds=15", f"--memory-numel={MEMORY_NUMEL}", f"--page={path}"]
    name = "replica_size=2"
    with pytest.MonkeyPatch.context() as patch:  # only one, because a job takes seconds to start
        patch.setattr(sync_cost, "MEMORY_SETTINGS", {name: sync_cost.MEMORY_SETTINGS[name]})
        sync_cost.main(["--replicas", "1", "2", *toy])
    return path.read_text()


def row_of(page: str, name: object) -> list[str]:
    found = re.search(rf"^\| {re.escape(str(name))} \|(.*)\|$", page, re.MULTILINE)
    assert found, page
    return [cell.strip().replace(",", "") for cell in found.group(1).split("|")]


def test_ledger_prediction_and_interface_agree(page: str) -> None:
    """Each of two replicas sends its payload and a header."""
    sent, per_parameter, predicted, crossed, ratio, *_ = row_of(page, 2)
    assert sent == predicted
    payload = CODECS["fp4"].num_bytes(NUMEL)
    overhead = int(sent) - all_gather_bytes(payload, 2)
    assert 0 < overhead <= MOST_OVERHEAD
    assert float(per_parameter) == pytest.approx(int(sent) / NUMEL, abs=1e-4)
    if sync_cost.why_no_network() is not None:
        assert (crossed, ratio) == ("not counted", "--")
        pytest.skip("a separate network needs Linux, root, `unshare` and `ip`")
    # headers, and packets that a busy machine resends; a doubled count would fail
    assert int(sent) < int(crossed) < 1.6 * int(sent)
    assert float(ratio) == pytest.approx(int(crossed) / int(sent), abs=1e-4)


def test_the_outer_state_has_the_size_of_the_design(page: str) -> None:
    host, gpu, resident, design = map(float, row_of(page, "replica_size=2"))
    assert host + gpu == design == 4.0
    if not torch.cuda.is_available():
        assert resident == pytest.approx(design, rel=0.3)
