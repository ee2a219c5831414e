"""`commfree-store status`: what a job's log says about its replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_commfree.elastic import status as status_module
from lightning_commfree.elastic.log import ABSTAINS, LEAVES
from lightning_commfree.elastic.status import JobWatch, Status, table
from lightning_commfree.stores import command
from lightning_commfree.stores.folder import FolderStore
from tests.elastic.log_twin import Job, Replica, play
from tests.elastic.memory_store import MemoryStore


def look(watch: JobWatch) -> Status:
    found = watch.look()
    assert found is not None
    return found


def played(store: Any) -> list[Replica]:
    """Play a job of two replicas to its end."""
    settings = {"max_steps": "26"}
    job = Job(store, 26, {"sync_every": 8, "num_fragments": 2}, 30.0, min_replicas=2)
    job.config = settings
    replicas = [Replica(f"r{i}", i, job).start() for i in range(2)]
    play(replicas)
    return replicas


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_it_shows_a_job_that_has_ended(kind: str, tmp_path: Path) -> None:
    store: Any = MemoryStore() if kind == "memory" else FolderStore(tmp_path)
    played(store)
    keys = store.list("")
    found = look(JobWatch(store))
    assert store.list("") == keys
    # flights 0 to 4 are launched after steps 8, 12, ... 24; 6 and 7 are the last round
    assert found[:5] == (7, 26, 26, 7, True)
    assert [(row.slot, row.last, row.listed, row.state) for row in found.rows] == [
        (0, 7, 7, "listed"),
        (1, 7, 7, "listed"),
    ]
    for row in found.rows:
        sizes = [len(store.get(f"x/{flight}/{row.name}")) for flight in (*range(5), 6, 7)]
        assert row.message_bytes == sum(sizes) / 7
    assert table(found).splitlines()[0] == (
        "Exchange 7, launched after step 26 of 26. The job has ended."
    )


def job_of(slots: dict[str, int], commits: list[list[str]]) -> MemoryStore:
    """Write a log by hand; each message has its own size, and step 10 in its header."""
    store = MemoryStore()
    store.create("config", json.dumps({"first": 0, "settings": {}}).encode())
    for number, member in enumerate(slots.items()):
        store.create(f"roster/{number}", json.dumps(member).encode())
    for flight, names in enumerate(commits):
        add_commit(store, flight, names)
    return store


def add_commit(store: MemoryStore, flight: int, names: list[str]) -> None:
    for name in names:
        message = bytes(48) + (10).to_bytes(8, "little") + bytes(len(name))
        store.create(f"x/{flight}/{name}", message)
    entries = [(name, 56 + len(name)) for name in names]
    store.create(f"commit/{flight}", json.dumps(entries).encode())


def test_it_tells_late_silent_and_leaving_replicas_apart() -> None:
    names = ["a", "late", "silent", "left", "nan", "new"]
    first, latest = ["a", "late", "silent", "left", "nan"], ["a"]
    store = job_of({name: slot for slot, name in enumerate(names)}, [first, *[latest] * 4])
    store.create("x/4/late", bytes(60))
    store.create("x/1/left", LEAVES)
    store.create("x/5/nan", ABSTAINS)
    found = look(JobWatch(store))
    assert (found.flight, found.step, found.looked_at, found.ended) == (4, 10, 5, False)
    assert {row.name: row[2:] for row in found.rows} == {
        "a": (4, 5, 57.0, "listed"),
        "late": (0, 1, 60.0, "late, sent 4"),
        "silent": (0, 1, 62.0, "silent"),
        "left": (0, 1, 60.0, "has left, sent 1"),
        "nan": (0, 1, 59.0, "NaN, sent 5"),
        "new": (None, 0, None, "silent"),
    }
    assert table(found) == "\n".join(
        [
            "Exchange 4, launched after step 10",
            "slot  replica  last listed  in last 5  behind  bytes per exchange  state",
            "0     a        4            5          0       57                  listed",
            "1     late     0            1          4       60                  late, sent 4",
            "2     silent   0            1          4       62                  silent",
            "3     left     0            1          4       60                  has left, sent 1",
            "4     nan      0            1          4       59                  NaN, sent 5",
            "5     new      -            0          -       -                   silent",
        ]
    )


def test_the_latest_owner_of_a_slot_is_shown_and_who_was_listed_lately() -> None:
    store = job_of({"a": 0, "gone": 1, "b": 1}, [["a", "gone"], *[["a", "b"]] * 10])
    store.create("roster/3", json.dumps(["asks", -1]).encode())
    watch = JobWatch(store)
    assert [row.name for row in look(watch).rows] == ["a", "gone", "b"]
    for flight in range(11, 30):
        add_commit(store, flight, ["a", "b"])
    store.overwrite("head", b"25")
    found = look(watch)
    assert found.looked_at == 20
    assert [(row.name, row.listed) for row in found.rows] == [("a", 20), ("b", 20)]


def test_the_rate_is_that_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(status_module.time, "monotonic", lambda: now_s)
    store = job_of({"a": 0}, [["a"]])
    watch = JobWatch(store)
    look(watch)
    assert watch.per_minute() is None
    for flight in range(1, 31):
        now_s += 10.0
        if flight > 20:  # a stall of 200 s is forgotten after a minute
            add_commit(store, flight - 20, ["a"])
        text = table(look(watch), watch.per_minute())
    assert text.startswith("Exchange 10, launched after step 10; 6.0 exchanges per minute\n")


def test_the_command_shows_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = tmp_path.as_uri()
    assert command.main(["status", url]) == 1
    assert capsys.readouterr().out == (
        f"There is no job in {url}: no replica has started with this store.\n"
    )
    store = FolderStore(tmp_path)
    for key, data in job_of({"a": 0}, []).objects.items():
        store.create(key, data)
    assert command.main(["status", url]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "No exchange has been committed yet"


def test_it_repeats_the_table_until_ctrl_c_and_through_an_outage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    away, looks = tmp_path / "away", []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            (tmp_path / "run").rename(away)
        elif len(looks) == 2:
            away.rename(tmp_path / "run")
        else:
            raise KeyboardInterrupt

    (tmp_path / "run").mkdir()
    store = FolderStore(tmp_path / "run")
    for key, data in job_of({"a": 0}, [["a"]]).objects.items():
        store.create(key, data)
    monkeypatch.setattr(command.time, "sleep", pause)
    assert command.main(["status", (tmp_path / "run").as_uri(), "--every", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert looks == [5.0] * 3
    assert [line.split(",")[0] for line in lines if line.startswith("Exchange")] == [
        "Exchange 0"
    ] * 2
    assert sum("did not answer" in line and "is not mounted" in line for line in lines) == 1
    assert lines[-3].endswith("0.0 exchanges per minute")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["file:///nothing/here"], "does not exist on this machine"),
        (["file:///tmp", "--every", "0"], "'0' is not a positive number of seconds"),
        (["file:///tmp", "--every", "often"], "'often' is not a positive number of seconds"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["status", *words])
    assert text in capsys.readouterr().err
