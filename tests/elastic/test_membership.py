"""What a quorum decides: who is in the next view, who must fetch, who waits; who is dead."""

from __future__ import annotations

import queue
import socket
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.elastic.membership import (
    DEAD,
    ENDING,
    FINISHED,
    JOINING,
    LEAVING,
    MEMBER,
    ElasticMembership,
    Limits,
    Member,
    Quorum,
    decide,
    shrunk,
)

LIMITS = Limits(min_replicas=1, max_replicas=4)


def member(name: str, slot: int, **changes: Any) -> Member:
    """A member of the view "v" of three, which has completed five flights."""
    known = {"status": MEMBER, "flights": 5, "view": "v", "view_size": 3, "number": 7}
    return Member(name, slot=slot, **{**known, **changes})  # type: ignore[arg-type]


def joiner(name: str, flights: int) -> Member:
    return Member(name, JOINING, flights)


A, B, C = member("a", 0), member("b", 1), member("c", 2)


def decided(*members: Member, number: int = 7, limits: Limits = LIMITS) -> Any:
    return decide(Quorum(number, members), limits)


def slots(decision: Any) -> dict[str, int]:
    return {m.replica: m.slot for m in decision.members}


def test_those_who_come_first_found_the_job_in_order_of_their_names() -> None:
    new = [Member("b"), Member("a"), Member("c")]
    assert slots(decided(*sorted(new))) == {"a": 0, "b": 1, "c": 2}


def test_founders_wait_for_the_least_number_of_replicas() -> None:
    decision = decided(Member("a"), limits=Limits(2, 4))
    assert not decision.members
    assert decision.reason == "only 1 of at least 2 replicas (`min_replicas`) are present"


def test_the_file_of_the_latest_step_founds_the_job() -> None:
    decision = decided(Member("a", step=10), Member("b"), Member("c", step=10))
    assert slots(decision) == {"a": 0, "c": 1}


def test_the_same_members_keep_their_view() -> None:
    assert decided(A, B, C).is_same


def test_a_broken_channel_makes_a_new_view_of_the_same_members() -> None:
    decision = decided(A, B._replace(broken=True), C)
    assert slots(decision) == {"a": 0, "b": 1, "c": 2}
    assert not decision.is_same


def test_a_dead_member_is_left_out() -> None:
    assert slots(decided(A, C, number=8)) == {"a": 0, "c": 2}


def test_a_joiner_that_has_caught_up_takes_the_lowest_free_slot() -> None:
    assert slots(decided(A, C, joiner("d", 5), number=8)) == {"a": 0, "d": 1, "c": 2}


def test_two_joiners_take_slots_in_order_of_their_names() -> None:
    decision = decided(A, C, joiner("d", 5), joiner("e", 5), number=8)
    assert slots(decision) == {"a": 0, "d": 1, "c": 2, "e": 3}


def test_nobody_waits_for_a_joiner_that_is_behind() -> None:
    decision = decided(A, B, C, joiner("d", 4), joiner("e", -1), number=8)
    assert slots(decision) == {"a": 0, "b": 1, "c": 2}
    assert decision.is_same


def test_without_a_free_slot_a_joiner_stays_out() -> None:
    assert "d" not in slots(decided(A, B, C, joiner("d", 5), limits=Limits(1, 3)))


def test_members_fetch_a_flight_that_another_one_has_completed() -> None:
    decision = decided(A._replace(flights=6), B)
    assert not decision.members
    assert decision.ahead.replica == "a"


def test_a_member_that_was_away_while_others_went_on_is_not_established() -> None:
    ahead = [m._replace(flights=9, view="w", view_size=2) for m in (A, C)]
    decision = decided(ahead[0], B, ahead[1])
    assert slots(decision) == {"a": 0, "c": 2}
    assert "b" not in [m.replica for m in decision.established]


def test_a_restarted_rendezvous_cannot_split_a_view() -> None:
    decision = decided(A, number=1)
    assert decision.restarted
    assert not decision.members
    assert slots(decided(A, B, number=2)) == {"a": 0, "b": 1}


def test_half_of_a_view_waits_after_a_restart_of_the_rendezvous() -> None:
    pair = [m._replace(view_size=2) for m in (A, B)]
    assert not decided(pair[0], number=7).members, "the same number, but other replicas"
    assert not decided(pair[0], joiner("d", 5), number=3).members
    assert slots(decided(pair[0], number=8)) == {"a": 0}, "it knows that the other one is dead"


def test_a_member_that_leaves_is_left_out_and_counts_as_present() -> None:
    leaving = [m._replace(status=LEAVING) for m in (B, C)]
    assert slots(decided(A, *leaving, number=1)) == {"a": 0}


def test_a_member_whose_process_has_ended_is_left_out_and_does_not_count() -> None:
    dead = [m._replace(status=DEAD) for m in (B, C)]
    decision = decided(A, B, dead[1])
    assert slots(decision) == {"a": 0, "b": 1}
    assert [m.replica for m in decision.established] == ["a", "b"]
    assert decided(A, *dead).restarted, "two of three might continue elsewhere"


def test_who_comes_back_gets_its_own_slot_or_stays_out() -> None:
    back = joiner("e", 5)._replace(slot=3)
    decision = decided(A, C, joiner("d", 5), back, number=8)
    assert slots(decision) == {"a": 0, "d": 1, "c": 2, "e": 3}
    decision = decided(A, C, joiner("d", 5), back._replace(slot=1), number=8)
    assert slots(decision) == {"a": 0, "e": 1, "c": 2, "d": 3}
    assert slots(decided(A, C, back._replace(slot=2), number=8)) == {"a": 0, "c": 2}


def test_nobody_joins_a_job_that_is_ending() -> None:
    for status in (ENDING, FINISHED):
        decision = decided(A._replace(status=status), B, C, joiner("d", 5), number=8)
        assert "d" not in slots(decision)


def test_members_wait_below_the_least_number_of_replicas() -> None:
    assert "only 2 of at least 3" in decided(A, B, number=8, limits=Limits(3, 4)).reason


def test_a_pair_whose_job_went_on_or_ended_without_it_does_not_continue() -> None:
    """The number has increased twice, so there was a quorum without these two."""
    pair = [m._replace(view_size=4) for m in (A, B)]
    assert decided(*pair, number=9).missed
    assert slots(decided(*pair, number=8)) == {"a": 0, "b": 1}


def test_members_that_are_too_few_count_as_a_view_while_they_wait() -> None:
    """Otherwise a second quorum of the same number would look like a restarted rendezvous."""
    limits = Limits(2, 4)
    first = decided(A, number=8, limits=limits)
    assert (first.left, first.members) == (1, ())
    assert decided(A, B, C, number=8, limits=Limits(4, 4)).left == 0, "none is missing"
    waiting = A._replace(number=8, **shrunk(first.left))
    again = decided(waiting, number=8, limits=limits)
    assert (again.left, again.restarted) == (0, False)
    assert slots(decided(waiting, joiner("d", 5), number=11, limits=limits)) == {"a": 0, "d": 1}


def test_a_member_that_comes_back_while_the_others_wait_is_established() -> None:
    """It may have completed a flight that they have not, or the other way round."""
    pair = [m._replace(view_size=2) for m in (A, B)]
    waiting = pair[0]._replace(number=8, **shrunk(1))
    decision = decided(waiting, pair[1]._replace(flights=6), number=9, limits=Limits(2, 4))
    assert decision.ahead.replica == "b"
    assert [m.replica for m in decision.established] == ["a", "b"]
    decision = decided(waiting, pair[1]._replace(flights=4), number=9, limits=Limits(2, 4))
    assert decision.ahead.replica == "a"
    decision = decided(waiting, pair[1], number=9, limits=Limits(2, 4))
    assert slots(decision) == {"a": 0, "b": 1}
    assert not decision.is_same, "the exchange has failed"


class Asked(queue.Queue[Member]):
    """A rendezvous that keeps the requests, and responds with the same quorum each time."""

    answer = Quorum(0, ())

    def quorum(self, mine: Member) -> Quorum:
        self.put(mine)
        return self.answer

    def close(self) -> None:
        pass


def test_a_member_is_dead_when_its_machine_refuses_and_not_when_a_connection_breaks() -> None:
    """A process that is ending may close its connections before its listening socket."""
    rendezvous, transfer = Asked(), SimpleNamespace(address="", close=lambda: None)
    membership = ElasticMembership(rendezvous, transfer, "a", Ledger())  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)
    c = C._replace(store=f"127.0.0.1:{listener.getsockname()[1]}")
    membership.view_members, membership._quorum = (A, B, c), Quorum(7, (A, B, c))
    membership._notice_ends([c])
    listener.accept()[0].close()
    connection, _ = listener.accept()  # it comes again
    assert rendezvous.empty()
    listener.close()
    assert rendezvous.empty()
    connection.close()
    assert rendezvous.get(timeout=10) == c._replace(status=DEAD)
    membership.close()


@pytest.mark.parametrize(
    ("replica", "dead", "absent", "asked_for"),
    [
        ("a", "", 1, "ac"),
        ("b", "", 1, "b"),  # the first member of the view asks
        ("b", "a", 1, "bc"),  # the first of those that live
        ("a", "", 4, "acdef"),
        ("a", "", 5, "a"),  # more than a view may have members
    ],
)
def test_the_first_member_asks_also_for_the_dead_and_for_those_who_have_left(
    replica: str, dead: str, absent: int, asked_for: str
) -> None:
    gone = [member(name, 2, status=DEAD if name < "e" else LEAVING) for name in "cdefg"[:absent]]
    rendezvous, transfer = Asked(), SimpleNamespace(address="", close=lambda: None)
    rendezvous.answer = Quorum(7, (A, B, *gone))
    membership = ElasticMembership(
        rendezvous,  # type: ignore[arg-type]
        transfer,  # type: ignore[arg-type]
        replica,
        Ledger(),
        limits=LIMITS,
    )
    membership._dead = {*dead}
    membership._ask_alone()
    asked = {(mine := rendezvous.get(timeout=10)).replica: mine for _ in asked_for}
    assert "".join(sorted(asked)) == asked_for
    assert all(asked[m.replica] == m for m in gone if m.replica in asked)
    with pytest.raises(queue.Empty):
        rendezvous.get(timeout=0.2)
    membership.close()


def test_only_the_first_living_member_declares_others_dead() -> None:
    """Two that declare one each would not know that half of the view is dead."""
    asked = []
    for replica, dead in (("a", "c"), ("b", "c"), ("b", "ac"), ("a", "bc")):
        rendezvous, transfer = Asked(), SimpleNamespace(address="", close=lambda: None)
        membership = ElasticMembership(rendezvous, transfer, replica, Ledger())  # type: ignore[arg-type]
        refused = socket.create_server(("127.0.0.1", 0))
        c = C._replace(store=f"127.0.0.1:{refused.getsockname()[1]}")
        membership.view_members, membership._quorum = (A, B, c), Quorum(7, (A, B, c))
        membership._dead = {*dead} - {"c"}
        membership._notice_ends([c])
        refused.settimeout(10)
        connection, _ = refused.accept()
        refused.close()
        connection.close()
        with suppress(queue.Empty):
            asked.append((replica, dead, rendezvous.get(timeout=1).replica))
        membership.close()
    assert asked == [("a", "c", "c")]


def test_who_has_left_does_not_lead_a_later_view() -> None:
    """ "c" has left the view of four; "d" and "e" are two of the three in the next one."""
    c = member("c", 0, status=LEAVING, view="before", view_size=4)
    d, e = member("d", 1), member("e", 2)
    dead = member("f", 3, status=DEAD)
    assert slots(decided(c, d, e, dead)) == {"d": 1, "e": 2}
