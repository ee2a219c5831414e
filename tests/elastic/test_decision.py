"""Every interleaving of two and three replicas that decide about one exchange.

A scripted store answers one request at a time. The search follows every order in which replicas can
make their requests, and every moment at which a grace can end, a replica can abstain or die, or its
own landing can become due. States that were reached before are not followed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import pytest

from lightning_commfree.elastic.decision import (
    Action,
    Commit,
    Group,
    Heard,
    Land,
    Look,
    Read,
    Reduce,
    Rules,
    decide,
)

GRACE_S = 1.0
NAMES = "abc"


class Replica(NamedTuple):
    """One replica: where it is in its own sequence of requests, and what it knows."""

    name: str
    counts: bool = True  # False: it abstains
    put: bool = False
    heard: tuple[tuple[str, bool], ...] = ()
    commit: tuple[str, ...] | None = None
    late_s: float | None = None
    to_ask: tuple[str, ...] = ()  # keys to get, of an action that is being done
    means: tuple[str, ...] = ()  # owners whose means it has read or created
    landed: bool = False
    dead: bool = False


class World(NamedTuple):
    replicas: tuple[Replica, ...]
    messages: tuple[tuple[str, bool], ...] = ()
    commit: tuple[str, ...] | None = None
    means: tuple[str, ...] = ()  # owners whose means are in the store

    def change(self, i: int, one: Replica, **store: Any) -> World:
        replicas = (*self.replicas[:i], one, *self.replicas[i + 1 :])
        return self._replace(replicas=replicas, **store)


@dataclass
class Search:
    """Follows every order of requests from a start, and keeps what must hold."""

    possible: Sequence[str]  # who may send a message, as every replica believes
    expected: Sequence[str]
    min_replicas: int = 1
    patience_s: float = GRACE_S
    may_die: bool = False
    owners: int = 0  # members of a commit that own parts
    seen: dict[World, list[World]] = field(default_factory=dict)  # and the worlds that follow
    ends: set[World] = field(default_factory=set)

    def run(self, start: World) -> None:
        todo = [start]
        while todo:
            world = todo.pop()
            if world in self.seen:
                continue
            self.check(world)
            nexts = self.seen[world] = list(self.steps(world))
            if all(one.landed or one.dead for one in world.replicas):
                self.ends.add(world)
            todo += nexts

    def steps(self, world: World) -> Iterator[World]:
        for i, one in enumerate(world.replicas):
            if one.dead or one.landed:
                continue
            if self.may_die and i == 0:  # the others are like it
                yield world.change(i, one._replace(dead=True))
            if one.late_s is None and one.put:
                yield world.change(i, one._replace(late_s=0.0))
            elif one.late_s == 0.0:
                yield world.change(i, one._replace(late_s=GRACE_S))
            yield from self.request(world, i, one)

    def request(self, world: World, i: int, one: Replica) -> Iterator[World]:
        if not one.put:
            mine = (one.name, one.counts)
            after = one._replace(put=True, heard=(*one.heard, mine))
            yield world.change(i, after, messages=tuple(sorted({*world.messages, mine})))
            return
        if one.to_ask:
            yield world.change(i, self.answered(world, one))
            return
        action = self.decide(one)
        match action:
            case Land():
                yield world.change(i, one._replace(landed=True))
            case Commit(names):
                if world.commit is None:
                    yield world.change(i, taken(one, names), commit=names)
                else:
                    yield world.change(i, one._replace(to_ask=("commit",)))
            case Read(names):
                yield world.change(i, one._replace(to_ask=names))
            case Reduce(names):  # whose messages are in the store (`check`)
                means = tuple(sorted({*one.means, names[0]}))
                every = tuple(sorted({*world.means, names[0]}))
                yield world.change(i, one._replace(means=means), means=every)
            case Look(names):
                yield world.change(i, one._replace(to_ask=("commit", *names)))

    def answered(self, world: World, one: Replica) -> Replica:
        """Return a replica after the next of its gets."""
        # one by one for two replicas; with three, at once: their order adds many states
        now = one.to_ask[:1] if len(world.replicas) == 2 else one.to_ask
        after = one._replace(to_ask=one.to_ask[len(now) :])
        if "commit" in now and world.commit is not None:
            return taken(one, world.commit)
        if one.commit is not None and self.owners:
            return after._replace(means=tuple(sorted({*one.means, *({*now} & {*world.means})})))
        found = {(name, counts) for name, counts in world.messages if name in now}
        return after._replace(heard=tuple(sorted({*one.heard, *found})))

    def decide(self, one: Replica) -> Action:
        owners = (one.commit or ())[: self.owners]
        read = frozenset(one.means if self.owners else dict(one.heard))
        known = one.commit, one.late_s, one.name, owners, read
        heard = Heard(one.put, dict(one.heard), *known)
        group = Group(frozenset(self.expected), frozenset(self.possible))
        return decide(heard, group, Rules(GRACE_S, self.patience_s, self.min_replicas))

    def check(self, world: World) -> None:
        messages = dict(world.messages)
        if world.commit is not None:
            # listed messages are in the store, whole and finite, whatever happens to their senders
            assert all(messages.get(name) for name in world.commit)
            assert len(messages) >= self.min_replicas
        for one in world.replicas:
            assert one.commit in (None, world.commit)
            if one.landed:
                assert one.commit is not None
                if self.owners:
                    assert {*one.commit[: self.owners]} <= {*one.means} <= {*world.means}
                else:
                    assert {*one.commit} <= dict(one.heard).keys()


def taken(one: Replica, commit: tuple[str, ...]) -> Replica:
    """Return a replica that has taken a commit: what its owners create is not late yet."""
    late_s = None if one.late_s is None else 0.0
    return one._replace(commit=commit, to_ask=(), late_s=late_s)


def start_of(counts: Sequence[bool]) -> World:
    return World(tuple(Replica(name, one) for name, one in zip(NAMES, counts, strict=False)))


TWO = [*product([True, False], repeat=2)]
CASES = [*product(TWO, [False, True]), ((True, True, False), False)]


@pytest.mark.parametrize(("counts", "may_die"), CASES)
def test_all_land_the_same_commit_in_every_order(counts: tuple[bool, ...], may_die: bool) -> None:
    names = NAMES[: len(counts)]
    search = Search(names, names, may_die=may_die)
    search.run(start_of(counts))
    assert search.ends
    commits = {world.commit for world in search.ends if not all(r.dead for r in world.replicas)}
    counted = tuple(name for name, one in zip(names, counts, strict=True) if one)
    assert counted in commits  # in some order, nobody is left out
    if not may_die and not any(counts):
        assert commits == {()}


def stuck(search: Search) -> set[World]:
    """Return the worlds from which no order of requests lets all living replicas land."""
    good = {*search.ends}
    before: dict[World, list[World]] = {}
    for world, nexts in search.seen.items():
        for after in nexts:
            before.setdefault(after, []).append(world)
    todo = list(good)
    while todo:
        for world in before.get(todo.pop(), []):
            if world not in good:
                good.add(world)
                todo.append(world)
    return search.seen.keys() - good


@pytest.mark.parametrize(("size", "owners"), [(2, 0), (3, 0), (2, 1), (2, 2)])
def test_nobody_waits_for_ever_for_a_dead_replica(size: int, owners: int) -> None:
    search = Search(NAMES[:size], NAMES[:size], may_die=True, owners=owners)
    search.run(start_of([True] * size))
    assert not stuck(search)


def test_only_who_has_waited_for_an_owner_does_its_work() -> None:
    class Counting(Search):
        def decide(self, one: Replica) -> Action:
            action = super().decide(one)
            if isinstance(action, Reduce):
                assert action.owners == (one.name,) or one.late_s == GRACE_S
            return action

    search = Counting("ab", "ab", owners=2)
    search.run(start_of([True, True]))
    assert ("a", "b") in {world.means for world in search.ends}


def test_the_search_finds_replicas_that_wait_for_a_dead_owner() -> None:
    """If nobody did the work of an owner that died after its message, all would wait for ever."""

    class Patient(Search):
        def decide(self, one: Replica) -> Action:
            action = super().decide(one)
            is_mine = isinstance(action, Reduce) and action.owners == (one.name,)
            return Read(action.owners) if isinstance(action, Reduce) and not is_mine else action

    search = Patient("ab", "ab", owners=2, may_die=True)
    search.run(start_of([True, True]))
    assert any(world.commit == ("a", "b") for world in stuck(search))


def test_fewer_than_min_replicas_wait() -> None:
    search = Search("ab", "ab", min_replicas=2, may_die=True)
    search.run(start_of([True, True]))
    alone = [world for world in stuck(search) if any(one.dead for one in world.replicas)]
    assert alone  # one died before its message: the other waits for a third
    assert all(len(world.messages) < 2 for world in alone)


def test_an_abstaining_replica_counts_towards_min_replicas() -> None:
    search = Search("ab", "ab", min_replicas=2)
    search.run(start_of([True, False]))
    assert {world.commit for world in search.ends} == {("a",)}
    assert not stuck(search)


def test_one_that_abstains_does_not_end_the_job_when_another_one_is_late() -> None:
    search = Search("ab", "ab", patience_s=math.inf)
    search.run(start_of([True, False]))
    assert {world.commit for world in search.ends} == {("a",)}
    assert not stuck(search)


def test_a_newcomer_that_nobody_expects_is_listed_if_it_is_in_time() -> None:
    search = Search("abc", "ab")
    search.run(start_of([True, True, True]))
    assert {world.commit for world in search.ends} >= {("a", "b", "c"), ("a", "b")}
    assert not stuck(search)


def test_the_search_finds_a_commit_of_a_message_that_nobody_can_read() -> None:
    """If a replica counted its own message before the store has it, `check` would fail."""

    class Hasty(Search):
        def decide(self, one: Replica) -> Action:
            return super().decide(one._replace(put=True, heard=((one.name, True), *one.heard)))

        def request(self, world: World, i: int, one: Replica) -> Iterator[World]:
            match self.decide(one._replace(late_s=GRACE_S)):
                case Commit(names) if not one.put and world.commit is None:
                    yield world.change(i, one._replace(commit=names), commit=names)
            yield from super().request(world, i, one)

    search = Hasty("ab", "ab")
    with pytest.raises(AssertionError):
        search.run(start_of([True, True]))
