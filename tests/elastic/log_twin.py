"""Ranks of replicas on a job's log as threads of this process, and the twin that replays each rank.

The twin gets the store and what a replica noted (which steps it took, and which flights it launched
and landed after them). It is written without the package, except for the codecs. It trains the
replica again, and compares every message and every global copy. The ranks of a replica hold copies
of the model and train them on the same data, so the twin trains one.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import CODECS, DiLoCoSettings, split_into_fragments
from lightning_commfree.diloco.codec import Codec, decode_all
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.log import JobLog, LeftError
from lightning_commfree.elastic.ranks import ReplicaRanks
from lightning_commfree.elastic.transport import StoreTransport
from tests.diloco.training import ADAMW, DEFAULTS, WIDTH, Net, State, Trace, backward, follow
from tests.elastic.memory_store import MemoryStore
from tests.elastic.thread_channel import Meeting, ThreadChannel

HEADER_BYTES = 9 * 8
SEAL_BYTES = 40


class Killed(BaseException):
    """Ends a replica without a word to the others."""


class Leaves(BaseException):
    """Ends a replica after a step, in an orderly way, until it comes back."""


@dataclass
class Job:
    store: Any
    steps: int = 40
    changes: dict[str, Any] = field(default_factory=dict)  # of the settings
    grace_s: float = 0.5
    step_s: float = 0.0
    min_replicas: int = 1
    max_replicas: int = 4
    state_cycles: int = 4
    by_time: bool = False
    config: dict[str, str] = field(default_factory=dict)
    ranks: int = 1  # of each replica
    paces: dict[int, tuple[int, int]] = field(default_factory=dict)  # H and tau, by first step
    width: int = WIDTH  # of the model

    def settings(self) -> DiLoCoSettings:
        own = {"evaluate": "outer", "replica_size": self.ranks, **self.changes}
        return DiLoCoSettings(**{**DEFAULTS, **own})


@dataclass
class Replica:
    """One rank of a replica, and what it noted."""

    name: str
    data: int  # which data it trains on
    job: Job
    act: Callable[[ElasticDiLoCo, int], None] = lambda diloco, step: None  # after each step
    store: Any = None  # its access to the job's store; None: the store itself
    killed: bool = False
    events: list[tuple[Any, ...]] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    error: BaseException | None = None
    final: State | None = None
    first_name: str = ""
    own: bytes | None = None  # its state when it left
    away_s: float | None = None  # set while it leaves: for how long
    trains: bool = False
    continued: list[bool] = field(default_factory=list)  # whether it did so, at each return
    rank: int = 0
    meetings: list[Meeting] = field(default_factory=lambda: [Meeting(1) for _ in range(4)])

    def __post_init__(self) -> None:
        self.module = Net(width=self.job.width)  # here: its seed is that of all threads
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.log: JobLog | None = None

    def start(self) -> Replica:
        self.thread.start()
        return self

    def kill(self) -> None:
        """End it from a thread of its log, as a SIGKILL at a request would."""
        self.killed = True
        assert self.log is not None
        self.log.leave(0.0)

    def terminate(self, away_s: float) -> None:
        """Make it leave after this step, as SIGTERM does, and come back."""
        if self.trains and self.away_s is None:
            self.away_s = away_s
            assert self.log is not None
            self.log.leave(15.0)

    def poison(self, diloco: ElasticDiLoCo, p: int) -> None:
        """Fill a fragment with NaN, between two steps."""
        with torch.no_grad():
            for local in diloco.fragments[p].local:
                local.fill_(torch.nan)
        self.events.append(("poison", p))

    def _note(self, what: str, *about: Any) -> None:
        # a digest is a function, and changes with the next landing
        self.events.append((what, *(int(one()) if callable(one) else one for one in about)))

    def _run(self) -> None:
        self.first_name = self.first_name or self.name
        self._live()
        while self.away_s is not None:
            time.sleep(self.away_s)
            self.name, self.away_s = f"{self.name}'", None
            self.module = Net(width=self.job.width)
            self._live()

    def _live(self) -> None:
        """Train until the end, or until it leaves."""
        job, module = self.job, self.module
        settings = job.settings()
        fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
        within, *channels = (ThreadChannel(one, self.rank) for one in self.meetings)
        self.log = log = JobLog(
            self.store or job.store,
            self.name,
            lambda flight: transport.message_bytes(flight),
            job.min_replicas,
            job.grace_s,
            job.by_time,
            ReplicaRanks(*channels),
            lambda flight, members: transport.reduction(flight, members),
        )
        transport = StoreTransport(log, Ledger())
        diloco = ElasticDiLoCo(
            module,
            fragments,
            settings,
            transport,
            within,
            state_cycles=job.state_cycles,
            note=self._note,
        )
        diloco.last_step = job.steps
        if job.paces:
            follow(diloco, job.paces)
        optimizer = ADAMW(list(module.parameters()))
        diloco.optimizers = [optimizer]
        try:
            self._begin(diloco, optimizer)
            self._train(diloco, optimizer)
            diloco.finish()
            self.trace.record(module, diloco)
            self.final, self.away_s = self.trace.local[-1], None
        except Leaves:
            self.own = None
            if diloco.leave(15.0):
                file, (shared, own) = io.BytesIO(), diloco.state_dict()
                saved = {"shared": shared, "own": own, "optimizer": optimizer.state_dict()}
                torch.save(saved, file)
                self.own = file.getvalue()
            if self.own is None or self.killed:
                self.error, self.away_s, self.killed = Killed(), None, True
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = Killed() if self.killed and isinstance(error, LeftError) else error
            self.away_s = None
            if isinstance(self.error, Killed):
                self.killed = True
                log.leave(0.0)
        finally:
            self.trains = False
            transport.close()
            for thread in log._threads:
                if thread.ident is not None:
                    thread.join()  # a process that ends would end it, perhaps in a request
            if self.killed:
                self.error, self.away_s = Killed(), None

    def _begin(self, diloco: ElasticDiLoCo, optimizer: torch.optim.Optimizer) -> None:
        own: Any = self.own and torch.load(io.BytesIO(self.own), weights_only=True)
        if own:
            diloco.load_state_dict(own["shared"], own["own"])
        assert diloco.begin(self.job.config, self.job.max_replicas) is not None, "no free slot"
        if not own:
            return
        self.continued.append(diloco.continues)
        if diloco.continues:
            optimizer.load_state_dict(own["optimizer"])
        else:  # it is another replica
            self.events = [one for one in self.events if one[0] == "state"][-1:]
            self.first_name = self.name

    def _train(self, diloco: ElasticDiLoCo, optimizer: torch.optim.Optimizer) -> None:
        self.trains = True
        diloco.land_postponed()
        self._end_if_asked()
        while diloco.step < self.job.steps:
            backward(self.module, self.data, diloco.inner_steps + 1)
            with diloco.stepping():
                optimizer.step()
            diloco.after_step()
            if self.killed:
                raise Killed
            self.trace.record(self.module, diloco)
            time.sleep(self.job.step_s)
            self.act(diloco, diloco.inner_steps)
            self._end_if_asked()
        self.trains = False

    def _end_if_asked(self) -> None:
        if self.killed:
            raise Killed
        if self.away_s is not None:
            raise Leaves


def ranks_of(name: str, data: int, job: Job, act: Any = lambda *_: None) -> list[Replica]:
    """Return all ranks of a replica."""
    meetings = [Meeting(job.ranks) for _ in range(4)]
    return [
        Replica(name, data, job, act, rank=rank, meetings=meetings) for rank in range(job.ranks)
    ]


def start_ranks(name: str, data: int, job: Job, act: Any = lambda *_: None) -> list[Replica]:
    """Start all ranks of a replica."""
    return [rank.start() for rank in ranks_of(name, data, job, act)]


def play(replicas: Sequence[Replica], limit_s: float = 60.0) -> None:
    """Wait for the end of all replicas that have been started; raise what ended them."""
    end_s = time.monotonic() + limit_s
    for replica in replicas:
        replica.thread.join(max(end_s - time.monotonic(), 0))
        assert not replica.thread.is_alive(), f"{replica.name} has not ended"
        if replica.error is not None and not isinstance(replica.error, Killed):
            raise replica.error


def wait_until(true: Callable[[], bool], limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(0.01)


def killing(at: int) -> Any:
    def act(diloco: ElasticDiLoCo, step: int) -> None:
        if step == at:
            raise Killed

    return act


def listed_in(store: Any) -> list[list[str]]:
    """Return who was averaged, by flight."""
    flights = sorted(int(key.split("/")[1]) for key in store.list("commit/"))
    return [[name for name, _ in json.loads(store.objects[f"commit/{f}"])] for f in flights]


def parts_of(data: bytes) -> list[bytes]:
    """Return the parts of an object, whose seals must be right."""
    parts, start = [], 0
    while start < len(data):
        size, length, digest = struct.unpack_from("<qq24s", data, start)
        parts.append(data[start + SEAL_BYTES :][:length])
        assert size == len(data)
        assert digest == hashlib.sha256(parts[-1]).digest()[:24]
        start += SEAL_BYTES + length
    assert start == len(data)
    return parts


def split(values: Tensor, count: int) -> list[Tensor]:
    """Split values into parts of as many whole blocks, filled up with zeros."""
    size = -(-len(values) // (256 * count)) * 256 if count > 1 else len(values)
    return [*nn.functional.pad(values, (0, count * size - len(values))).split(size)]


def average(rows: list[Tensor], weights: list[int]) -> Tensor:
    if len({*weights}) == 1:
        total = rows[0] + 0.0
        for row in rows[1:]:
            total = total + row
        return total / len(rows)
    total = torch.zeros_like(rows[0])
    for row, weight in zip(rows, weights, strict=True):
        total = total + row * (weight / sum(weights))
    return total


class LogTwin:
    """Trains one rank of a replica again, from the log and from what it noted."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.store, settings = replica, replica.job.store, replica.job.settings()
        self.called = [(0, replica.first_name)]  # from a flight on
        self.codec, self.mix = CODECS[settings.wire_dtype], settings.mix
        self.last_codec = CODECS["fp4"] if self.codec.error_feedback else self.codec
        self.module = Net(width=replica.job.width)
        fragments = split_into_fragments(
            self.module, settings.num_fragments, settings.fragment_pattern
        )
        self.names = [list(fragment.parameters) for fragment in fragments]
        self.outer = [
            [nn.Parameter(self.module.get_parameter(n).detach().clone()) for n in names]
            for names in self.names
        ]
        self.make_outer = settings.outer_optimizer or torch.optim.SGD
        self.optimizers = [self.make_outer(outer) for outer in self.outer]
        self.inner = ADAMW(list(self.module.parameters()))
        self.since = [0] * len(fragments)
        ranks = self.replica.job.ranks
        numels = [-(-sum(outer.numel() for outer in one) // ranks) for one in self.outer]
        self.residuals = [torch.zeros(numel) for numel in numels]
        self.in_flight: dict[int, tuple[int, Tensor]] = {}  # flight, residual before it
        self.paces = [(0, settings.first_sync_every, settings.first_overlap_steps)]
        self.steps = self.messages = self.landings = 0
        self.reduced = 0  # means of parts that owners have created

    def replay(self) -> LogTwin:
        events = list(self.replica.events)
        while events and events[0][0] == "state" and not events[0][2]:  # before the first step
            self.take_state(*events.pop(0)[1:], keep=False)
        while any(event[0] == "at" for event in events):
            self.between_steps(events)
            self.train()
            while (event := events.pop(0))[0] != "at":
                self.follow(*event)
        self.between_steps(events)
        if any(event[0] == "launch" for event in events):  # it died in the middle of a step
            self.train()
        for event in events:  # the end of the fit, or of the replica
            self.follow(*event)
        return self

    def between_steps(self, events: list[tuple[Any, ...]]) -> None:
        while events and events[0][0] in ("poison", "renamed"):
            what, *about = events.pop(0)
            if what == "poison":
                self.poison(*about)
                continue
            if what == "renamed":
                self.called.append((about[0], about[1]))
            while events and events[0][0] != "begins":  # it lands what was due when it left
                self.follow(*events.pop(0))
            del events[:1]  # it may have died before

    def name_in(self, flight: int) -> str:
        return [name for first, name in self.called if first <= flight][-1]

    def train(self) -> None:
        self.steps += 1
        backward(self.module, self.replica.data, self.steps)
        self.inner.step()

    def follow(self, what: str, *about: Any) -> None:
        if what == "state":
            self.take_state(*about, keep=True)
        elif what == "pace":
            self.paces.append(about)
        elif what == "launch":
            self.launch(*about)
        elif what == "land":
            self.land(*about)
        elif what == "final":
            self.land_final(*about)

    @torch.no_grad()
    def take_state(self, flight: int, _: int, keep: bool) -> None:
        keep = keep and int(self.store.objects.get("end", b"-1")) != flight + 1  # it has ended
        which = json.loads(self.kept("config"))["founder"] if flight < 0 else flight
        if int(self.store.objects.get("end", b"-1")) == flight + 1:
            which = "end"
        parts = [
            torch.load(io.BytesIO(state_in(self.store, f"{which}", rank)), weights_only=True)
            for rank in range(self.replica.job.ranks)
        ]
        self.paces = parts[0]["paces"]
        listed = {
            p: any(one[0] == self.name_in(mine) for one in self.commit(mine))
            for p, (mine, _) in self.in_flight.items()
            if mine <= flight
        }
        for p in range(len(self.outer)):
            if p in listed:
                self.end_launch(p, listed[p])
            saved = [part["fragments"][p] for part in parts]
            before = [outer.detach().clone() for outer in self.outer[p]]
            copies = [part.flatten() for one in saved for part in one["global_copy"]]
            for outer, value in self.pieces(p, copies):
                outer.copy_(value)
            states = [state for one in saved for state in one["optimizer"]["state"].values()]
            momenta = [state["momentum_buffer"].flatten() for state in states]
            for outer, value in self.pieces(p, momenta) if momenta else ():
                self.optimizers[p].state[outer]["momentum_buffer"] = value.clone()
            for local, outer, old in zip(self.locals(p), self.outer[p], before, strict=True):
                if not keep:
                    local.copy_(outer)
                elif listed.get(p):
                    local.copy_(torch.lerp(local, outer, 1.0 - self.mix) if self.mix else outer)
                else:
                    local.copy_(local + (outer - old))
            if listed.get(p):
                self.since[p] = self.steps

    @torch.no_grad()
    def launch(self, flight: int, p: int, _: int, sent: bool) -> None:
        if not sent:
            return
        pairs = zip(self.outer[p], self.locals(p), strict=True)
        delta = self.share(torch.cat([(outer - local).flatten() for outer, local in pairs]))
        residual = self.residuals[p]
        self.in_flight[p] = flight, residual.clone()
        if self.codec.error_feedback:
            delta += residual.mul_(self.codec.error_feedback)
        payload = torch.empty(self.codec.num_bytes(len(delta)), dtype=torch.uint8)
        self.codec.encode(delta, out=payload, residual=residual)
        key = f"x/{flight}/{self.name_in(flight)}"
        if self.replica.killed and key not in self.store.objects | self.store.deleted:
            return  # it died before the store had the message
        message = self.kept(key, self.replica.rank)
        if message == b"-":
            assert not bool(delta.isfinite().all())
            return
        parts = parts_of(message)
        payloads = [payload]
        if len(parts) > 1:
            payloads = [self.encode(one, self.codec) for one in split(delta, len(parts))]
        for part, one in zip(parts, payloads, strict=True):
            assert part[HEADER_BYTES:][: len(one)] == one.numpy().tobytes(), flight
            assert self.header(part)[5] == self.steps - self.since[p], flight
        self.messages += 1

    @torch.no_grad()
    def land(self, flight: int, listed: bool, hashed: int) -> None:
        p = flight % len(self.outer)
        before = [outer.detach().clone() for outer in self.outer[p]]
        if self.is_first_at_pace(flight):
            self.optimizers[p].state.clear()
        for outer, gradient in zip(self.outer[p], self.mean(flight, p), strict=True):
            outer.grad = gradient
        self.optimizers[p].step()
        finite = listed or all(bool(local.isfinite().all()) for local in self.locals(p))
        for local, outer, old in zip(self.locals(p), self.outer[p], before, strict=True):
            if listed:
                local.copy_(torch.lerp(local, outer, 1.0 - self.mix) if self.mix else outer)
            elif finite:
                local.copy_(local + (outer - old))
            else:
                local.copy_(outer)
        self.end_launch(p, listed)
        if listed or not finite:
            self.since[p] = self.steps
        if not finite:
            self.repair(p)
        self.compare(p, hashed, flight)

    def is_first_at_pace(self, flight: int) -> bool:
        """Count launches, step by step, up to the flight."""
        total, launched, step, paces = len(self.outer), 0, 0, [*self.paces]
        _, sync_every, tau = paces.pop(0)
        start, waiting, fresh = 0, {*range(total)}, set[int]()
        while True:
            step += 1
            together = set()
            for p in range(total):
                since = step - start - p * sync_every // total
                if since % sync_every or since < sync_every * (p in waiting):
                    continue
                together.add(p)
                if launched == flight:
                    return p in fresh
                fresh.discard(p)
                launched += 1
            if paces and paces[0][0] == step:
                assert 0 in together, "a pace begins with fragment 0"
                before, (_, sync_every, tau) = tau, paces.pop(0)
                start = step + max(before - tau, 1 if total > sync_every else 0)
                waiting, fresh = together, {*range(total)}

    def end_launch(self, p: int, listed: bool) -> None:
        """If it did not count, the residual is again the one before."""
        _, before = self.in_flight.pop(p, (0, self.residuals[p]))
        if not listed:
            self.residuals[p] = before

    @torch.no_grad()
    def poison(self, p: int) -> None:
        for local in self.locals(p):
            local.fill_(torch.nan)

    @torch.no_grad()
    def land_final(self, flight: int, p: int, hashed: int) -> None:
        for outer, local, gradient in zip(
            self.outer[p], self.locals(p), self.mean(flight, p, self.last_codec), strict=True
        ):
            outer.copy_(outer - gradient)
            local.copy_(outer)
        self.compare(p, hashed, flight)

    def repair(self, p: int) -> None:
        """A replica with NaN takes the global copy of all that is not finite."""
        for q, names in enumerate(self.names):
            if q == p or not all(bool(one.isfinite().all()) for one in self.locals(q)):
                self.residuals[q] = torch.zeros_like(self.residuals[q])
                if q in self.in_flight:
                    self.in_flight[q] = self.in_flight[q][0], self.residuals[q]
                for local, outer in zip(self.locals(q), self.outer[q], strict=True):
                    local.copy_(outer)
                for name in names:
                    parameter = self.module.get_parameter(name)
                    state = self.inner.state[parameter]
                    if not all(bool(value.isfinite().all()) for value in state.values()):
                        del self.inner.state[parameter]

    def compare(self, p: int, hashed: int, flight: int) -> None:
        flat = self.share(torch.cat([outer.detach().flatten() for outer in self.outer[p]]))
        assert int(digest(flat)) == hashed, f"the global copy after flight {flight} differs"
        self.landings += 1

    def commit(self, flight: int) -> list[Any]:
        entries: list[Any] = json.loads(self.kept(f"commit/{flight}"))
        return entries

    def share(self, values: Tensor) -> Tensor:
        """Return the values that this rank exchanges, padded with zeros."""
        size = -(-len(values) // self.replica.job.ranks)
        mine = values[self.replica.rank * size :][:size]
        return nn.functional.pad(mine, (0, size - len(mine)))

    def pieces(self, p: int, parts: list[Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
        """Join the ranks' values, and split them into those of a fragment's tensors."""
        sizes = [outer.numel() for outer in self.outer[p]]
        split = torch.cat(parts)[: sum(sizes)].split(sizes)
        return [(o, part.view_as(o)) for o, part in zip(self.outer[p], split, strict=True)]

    def mean(self, flight: int, p: int, codec: Codec | None = None) -> list[Tensor]:
        means = [self.mean_of(flight, p, rank, codec) for rank in range(self.replica.job.ranks)]
        return [part for _, part in self.pieces(p, means)]

    def mean_of(self, flight: int, p: int, rank: int, codec: Codec | None = None) -> Tensor:
        codec = codec or self.codec
        names = [name for name, _ in self.commit(flight)]
        messages = [parts_of(self.kept(f"x/{flight}/{name}", rank)) for name in names]
        weights = [self.header(parts[0])[5] for parts in messages]
        if not any(weights):
            weights = [1] * len(weights)
        counted = [m for m, weight in zip(messages, weights, strict=True) if weight]
        weights = [weight for weight in weights if weight]
        numel = -(-sum(outer.numel() for outer in self.outer[p]) // self.replica.job.ranks)
        rows = [self.decode([one[HEADER_BYTES:] for one in m], numel, codec) for m in counted]
        mean = average(rows, weights)
        if f"y/{flight}/{names[0]}" not in self.store.objects | self.store.deleted:
            return mean
        self.reduced += 1
        return self.rounded_again(flight, rank, names, messages, mean, codec)

    def rounded_again(
        self,
        flight: int,
        rank: int,
        names: list[str],
        messages: list[list[bytes]],
        mean: Tensor,
        codec: Codec,
    ) -> Tensor:
        """Round the mean as the owners of its parts did, and compare it with what they created."""
        count = len(messages[0])
        owners = names[:count]
        objects = [parts_of(self.kept(f"y/{flight}/{name}", rank)) for name in owners]
        assert objects[0].pop(0) == b"".join(parts[0][:HEADER_BYTES] for parts in messages)
        for i, parts in enumerate(objects):
            assert len(parts) == count * (i + 1) // len(owners) - count * i // len(owners)
        norms = -(-4 * (len(names) + 1) // 8) * 8
        means = [one[norms:] for parts in objects for one in parts]
        for one, values in zip(means, split(mean, count), strict=True):
            payload = self.encode(values, codec).numpy().tobytes()
            assert one[: len(payload)] == payload, flight
        return self.decode(means, len(mean), codec)

    @staticmethod
    def encode(values: Tensor, codec: Codec) -> Tensor:
        payload = torch.empty(codec.num_bytes(len(values)), dtype=torch.uint8)
        codec.encode(values, out=payload)
        return payload

    @staticmethod
    def decode(parts: list[bytes], numel: int, codec: Codec) -> Tensor:
        size = len(split(torch.empty(numel), len(parts))[0])
        decoded = []
        for part in parts:
            payload = torch.frombuffer(bytearray(part[: codec.num_bytes(size)]), dtype=torch.uint8)
            decoded.append(decode_all(codec, payload, torch.empty(size)))
        return torch.cat(decoded)[:numel]

    @staticmethod
    def header(message: bytes) -> list[int]:
        return torch.frombuffer(bytearray(message[:HEADER_BYTES]), dtype=torch.int64).tolist()

    def locals(self, p: int) -> list[Tensor]:
        return [self.module.get_parameter(name).detach() for name in self.names[p]]

    def kept(self, key: str, rank: int = 0) -> bytes:
        suffix = f".{rank}" if rank else ""
        return (self.store.objects | self.store.deleted)[f"{key}{suffix}"]


def state_in(store: MemoryStore, which: str, rank: int = 0) -> bytes:
    """Return a state that a replica has stored, though it may have been deleted."""
    kept = store.objects | store.deleted
    name, counts = json.loads(kept[f"state/{which}"])
    keys = (f"part/{which}.{name}.{rank}.{i}" for i in range(counts[rank]))
    return b"".join(part for key in keys for part in parts_of(kept[key]))


def assert_equal_the_twin(replicas: Sequence[Replica], least_landings: int = 1) -> list[LogTwin]:
    """Replay every rank from the log.

    The ranks of a replica have taken the same steps, and those that finished have the same weights
    and the same pace.
    """
    twins = [LogTwin(replica).replay() for replica in replicas]
    steps: dict[str, set[int]] = {}
    finals = [replica.final for replica in replicas if replica.final is not None]
    for final in finals[1:]:
        assert all(torch.equal(final[name], finals[0][name]) for name in final)
    for replica, one in zip(replicas, twins, strict=True):
        assert one.landings >= least_landings, replica.name
        steps.setdefault(replica.name, set()).add(one.steps)
        if replica.final is not None:
            state = {n: p.detach() for n, p in one.module.named_parameters()}
            assert all(torch.equal(replica.final[name], state[name]) for name in state)
    paces = [one.paces for one in twins if one.replica.final is not None]
    assert all(one == paces[0] for one in paces)
    assert all(len(taken) == 1 for taken in steps.values())
    return twins
