from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from lightning_commfree.stores.folder import FolderStore
from lightning_commfree.stores.store import StoreError, open_store, probe


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "not the URL of a store"),
        ("/mnt/share", "not the URL of a store"),
        ("http://10.0.0.1:80", "not the URL of a store"),
        ("file://share/run", "absolute path and no host"),
        ("file:run", "absolute path and no host"),
        ("file:///nothing/here", "does not exist on this machine"),
        ("tcp://10.0.0.1", "not HOST:PORT"),
        ("tcp://:29510", "not HOST:PORT"),
        ("tcp://10.0.0.1:port", "not HOST:PORT"),
        ("tcp://10.0.0.1:99999", "not HOST:PORT"),
        ("tcp://10.0.0.1:29510/run", "has a path"),
        ("tcp://me:secret@10.0.0.1:29510", "has a user"),
        ("s3:///run", "names no bucket"),
        ("s3://bucket/run?region=x", "a query"),
    ],
)
def test_a_wrong_url_is_refused_by_a_sentence(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_store(url)


def test_a_folder_opens_by_its_url(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    store = open_store(f"file://{tmp_path}/a%20run")
    probe(store)
    assert store.address == f"file://{folder}"


def test_a_bucket_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install obstore"):
        open_store("s3://bucket/run")


def test_a_store_that_creates_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    monkeypatch.setattr(store, "create", lambda key, data: True)
    with pytest.raises(ValueError, match="does not create a key only if it is absent"):
        probe(store)


def test_an_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(StoreError("tcp://10.0.0.1:29510", "get", "refused")))
    assert str(error) == "The store tcp://10.0.0.1:29510 did not answer `get`: refused"
