"""An elastic replica on a CUDA device, walked without one, as `tests.diloco.test_cuda_walk_diloco`.

`WalkedLog` stands in for the log's threads and the store. What a thread of the log does for the
training thread runs where that waits for it; a state, which nobody waits for, is saved as late as
possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import DiLoCoSettings, split_into_fragments
from lightning_commfree.diloco.exchange import Header
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.log import Landed, Member
from lightning_commfree.elastic.ranks import ReplicaRanks
from lightning_commfree.elastic.transport import StoreTransport
from tests.cuda_walk import CPU, CudaWalk, Question, is_walked
from tests.diloco.test_cuda_walk_diloco import FIGURES, Questions, Training
from tests.diloco.training import DEFAULTS

# Its last two messages come too late, and then it is behind.
BEHIND: dict[str, Any] = {"missed": (3, 4), "behind_at": 5}
ME, OTHER = Member("me", 0), Member("other", 1)


class WalkedLog:
    """The log of a job of `size` replicas, without threads: all of them send at once.

    Args:
        walk: what the threads do is its step "thread".
        size: replicas in each commit.
        missed: flights that the others have decided before this replica launches them.
        behind_at: flights launched when the others are so far ahead that this replica continues
            from a state.
    """

    name, ranks, min_replicas = ME.name, ReplicaRanks(), 1

    def __init__(
        self, walk: CudaWalk, size: int, missed: tuple[int, ...] = (), behind_at: int = -1
    ) -> None:
        self.launched = 0
        self.transport: StoreTransport
        self._walk, self.size, self._missed, self._behind_at = walk, size, missed, behind_at
        self._sends: dict[int, Callable[[], object]] = {}
        self._states: list[tuple[int, Callable[[], bytes]]] = []
        self.states: dict[int, bytes] = {}

    def begin(self, config: Mapping[str, str], state: Callable[[], bytes], first: int) -> None:
        del config
        self.states[first - 1] = state()

    def enroll(self, max_replicas: int) -> Member:
        del max_replicas
        return ME

    def end(self) -> int:
        return -1

    def start(self, launched: int) -> None:
        self.launched = launched

    continue_at = start

    def newest_state(self) -> tuple[int, bytes]:
        """Return the first one: to wait for a newer one would wait for its copies, too."""
        return -1, self.states[-1]

    def is_behind(self, following: bool) -> bool:
        del following
        was = self.launched == self._behind_at
        self._behind_at = -1 if was else self._behind_at
        return was

    def is_far_behind(self, flights: int) -> bool:
        del flights
        return True

    def is_decided(self, flight: int) -> bool:
        return flight in self._missed

    def is_listed(self, flight: int) -> bool:
        return flight not in self._missed

    def launch(self) -> int:
        self.launched += 1
        return self.launched - 1

    def send(self, flight: int, make: Callable[[], object]) -> None:
        self._sends[flight] = make

    def landed(self, flight: int) -> Landed:
        """Create this replica's message; return the objects of all, which have no values here."""
        if flight in self._sends:
            with self._walk.during("thread"):
                self._sends.pop(flight)()
        members = [ME, *[OTHER] * (self.size - 1)]
        if flight in self._missed:
            members[0] = OTHER
        return Landed(members, self._objects(flight), abstained=False, link_s=None)

    def _objects(self, flight: int) -> list[list[memoryview]]:
        """Return objects of the right sizes: the messages, or the means of the parts' owners."""
        reduced = self.transport.reduction(flight, self.size)
        if reduced is None:
            exchange = self.transport.exchange(flight % len(self.transport._sizes))
            part = memoryview(bytes(exchange._up.num_bytes))
            return [[part] * exchange.route.num_shards] * self.size
        part = memoryview(bytes(reduced._down.num_bytes))
        objects = [[part] * len(reduced._owned(owner)) for owner in range(reduced.owners)]
        objects[0].insert(0, memoryview(bytes(8 * len(Header._fields) * self.size)))
        return objects

    def name_in(self, flight: int) -> str:
        del flight
        return self.name

    def is_storing(self) -> bool:
        return False

    def write_state(self, flight: int, state: Callable[[], bytes], every: int = 0) -> None:
        del every
        self._states.append((flight, state))

    write_final_state = write_state

    def later(self, job: Callable[[], object]) -> None:
        del job

    def save(self) -> None:
        """Save the states that were handed to the log."""
        with self._walk.during("thread"):
            while self._states:
                flight, state = self._states.pop(0)
                self.states[flight] = state()

    def leave(self, within_s: float) -> None:
        del within_s

    def close(self) -> None:
        return


class ElasticTraining(Training):
    """A replica of an elastic job of `size` replicas; more arguments are those of `WalkedLog`."""

    together = False
    note: Callable[..., object] = lambda *_: None
    diloco: ElasticDiLoCo

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        size: int,
        walk: CudaWalk | None = None,
        **of_log: Any,
    ) -> None:
        super().__init__(patch, 1, CPU, walk=walk)
        self.log = WalkedLog(self.walk, size, **of_log)
        saved: dict[bytes, Any] = {}

        def save(state: Any, file: Any) -> None:
            # values of the host are read where they are saved
            saved[key := str(len(saved)).encode()] = pytree.tree_map_only(
                Tensor, torch.clone, state
            )
            file.write(key)

        def message(_: StoreTransport, exchange: Any, parts: Tensor, tag: str) -> bytes:
            del exchange, tag
            assert parts.device == CPU
            parts.clone()  # the thread reads it
            return b""

        patch.setattr(torch, "save", save)
        patch.setattr(torch, "load", lambda file, **_: saved[file.read()])
        patch.setattr(StoreTransport, "_message", message)

    @override
    def _start(self, **changes: Any) -> None:
        settings = DiLoCoSettings(
            **{**DEFAULTS, "sync_every": 2, "num_fragments": 3, "evaluate": "outer", **changes}
        )
        fragments = split_into_fragments(self.module, 3, "strided")
        log: Any = self.log
        with self.walk.during("start"):
            self.log.transport = StoreTransport(log, Ledger())
            self.diloco = ElasticDiLoCo(
                self.module, fragments, settings, self.log.transport, state_cycles=1, note=self.note
            )
            self.diloco.warm_up()
            self.diloco.begin({}, max_replicas=self.log.size)

    @override
    def run(self, waits: bool = False, **changes: Any) -> Questions:
        found = super().run(waits, **changes)
        with self.walk:
            self.log.save()
        return found


# The first message of the log's thread waits for its codes, and the state that a job begins with
# for its copies. Another state is read back, and goes up.
START = {
    Question("start", "comm/background.py wait", "wait"),
    Question("start", "diloco/outer.py load_state_dict", "copy up"),
}
THREAD = {Question("thread", "comm/background.py wait", "wait")}
CONTINUED = {
    Question("after step", "comm/background.py wait", "wait"),
    Question("after step", "diloco/outer.py load_state_dict", "copy up"),
}


def missed(step: str) -> Questions:
    """Return what it asks if a commit does not list it: whether its values are finite."""
    return {Question(step, "elastic/algorithm.py merge", "value")}


@pytest.mark.parametrize("size", [2, 9])
def test_a_landing_waits_for_nothing_and_a_missed_one_for_a_flag(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    training = ElasticTraining(monkeypatch, size)
    assert training.run() == START | THREAD | FIGURES
    assert set(training.log.states) == {-1, 2, 8}
    two_phase = training.log.transport.reduction(0, size) is not None
    assert two_phase == (size == 9)
    assert all(is_walked(f.global_copy) for f in training.diloco.fragments)

    training = ElasticTraining(monkeypatch, size, missed=(1,))
    assert training.run() == START | THREAD | FIGURES | missed("after step")


def test_a_replica_that_is_far_behind_copies_a_state_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = ElasticTraining(monkeypatch, 2, **BEHIND)
    assert training.run() == START | THREAD | FIGURES | CONTINUED


def test_a_planted_digest_at_each_landing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    training = ElasticTraining(monkeypatch, 2)
    training.note = lambda what, *about: about[-1]().item() if what == "land" else None
    assert {question.kind for question in training.run()} >= {"value"}
