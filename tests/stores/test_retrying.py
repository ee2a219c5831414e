from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from lightning_commfree.stores import retrying
from lightning_commfree.stores.folder import FolderStore
from lightning_commfree.stores.retrying import Retrying
from lightning_commfree.stores.store import StoreError
from tests.stores.contract import check_contract, check_race
from tests.stores.faulty_store import FaultyStore


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retrying, "_LONGEST_PAUSE_S", 0.01)


def test_a_store_that_fails_keeps_the_contract_when_requests_are_repeated(tmp_path: Path) -> None:
    faulty = FaultyStore(FolderStore(tmp_path), refused=0.2, lost=0.2)
    store = Retrying(faulty)
    check_contract(store)
    counts = store.counts()
    assert counts["create"].failures > 20
    assert counts["create"].requests > counts["create"].failures
    assert counts["create"].sent_bytes > 40 << 20
    assert counts["get"].received_bytes >= 20 << 20
    assert counts["list"].seconds > 0


def test_a_lost_answer_has_one_winner(tmp_path: Path) -> None:
    store = Retrying(FaultyStore(FolderStore(tmp_path), lost=0.7))
    check_race(store)


def test_without_repeating_a_lost_answer_is_an_error(tmp_path: Path) -> None:
    faulty = FaultyStore(FolderStore(tmp_path), lost=1.0)
    with pytest.raises(StoreError, match=r"file://.* did not answer `create`: answer lost"):
        faulty.create("a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_an_outage_ends_and_the_request_succeeds(tmp_path: Path) -> None:
    faulty = FaultyStore(FolderStore(tmp_path))
    faulty.away = True
    threading.Timer(0.2, lambda: setattr(faulty, "away", False)).start()
    assert Retrying(faulty).create("a", b"1")


def test_a_request_fails_after_its_time_or_at_a_stop(tmp_path: Path) -> None:
    faulty = FaultyStore(FolderStore(tmp_path))
    faulty.away = True
    began = time.monotonic()
    with pytest.raises(StoreError, match="refused"):
        Retrying(faulty, timeout_s=0.1).get("a")
    assert 0.1 <= time.monotonic() - began < 5

    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(StoreError, match="refused"):
        Retrying(faulty, stop=stop).get("a")


def test_after_an_outage_other_processes_may_still_pause(tmp_path: Path) -> None:
    faulty = FaultyStore(FolderStore(tmp_path))
    faulty.away = True
    store = Retrying(faulty, timeout_s=0.05)
    with pytest.raises(StoreError):
        store.get("a")
    assert store.failed_s < store._back_s <= store.failed_s + retrying._LONGEST_PAUSE_S
    assert store.away_s >= 0.05
    back_s, away_s = store._back_s, store.away_s
    with pytest.raises(StoreError):
        store.get("a")  # the time that both count is counted once
    assert store.away_s - away_s <= store._back_s - back_s + 1e-6


def test_a_listing_may_be_late(tmp_path: Path) -> None:
    store = FaultyStore(FolderStore(tmp_path), late_listing=True)
    store.create("a", b"1")
    assert store.list("") == []
    assert store.list("") == ["a"]
