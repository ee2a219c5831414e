"""How often a replica looks at the store, and a formula for its requests and bytes.

`docs/elastic.md` has the formula.
"""

from __future__ import annotations

import math
import time

import pytest

from commfree_planner.store import STATE_BYTES
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.polling import first_look_s, look_at_s, watch_pause_s
from lightning_commfree.elastic.states import PART_BYTES
from tests.elastic.log_twin import HEADER_BYTES, SEAL_BYTES, Job, Replica, play
from tests.elastic.memory_store import MemoryStore, RecordingStore
from tests.pages import ROOT

pytestmark = pytest.mark.usefixtures("turns")


def looks_until(found_s: float, first_s: float = 0.0, request_s: float = 0.0) -> list[float]:
    """Return when a replica looks, from the beginning of a wait until it finds something."""
    looks = [look_at_s(0.0, first_s, float("-inf"))]
    while looks[-1] < found_s:
        looks.append(look_at_s(0.0, first_s, looks[-1] + request_s))
    return looks


@pytest.mark.parametrize("found_s", [0.01, 0.1, 1.0, 3.0])
def test_while_training_waits_looks_are_close(found_s: float) -> None:
    looks = looks_until(found_s)
    assert looks[0] == 0.0
    assert looks[-1] < max(1.25 * found_s, found_s + 0.02) + 1e-9
    assert len(looks) <= 18 + 2 * found_s


def test_the_pause_has_a_limit() -> None:
    looks = looks_until(60.0)
    assert max(after - before for before, after in zip(looks, looks[1:], strict=False)) == 0.5


@pytest.mark.parametrize("took_s", [0.1, 1.0, 3.0])
def test_flights_that_take_equally_long_need_few_looks(took_s: float) -> None:
    recent: list[float] = []
    for _ in range(20):
        looks = looks_until(took_s, first_look_s(recent))
        recent = [*recent, looks[-1]][-4:]
    assert len(looks) <= 4
    assert looks[-1] < 1.3 * took_s


def test_a_flight_that_was_slow_once_does_not_delay_the_next_look() -> None:
    assert first_look_s([1.0, 60.0, 1.1, 1.2]) == 0.8
    assert first_look_s([]) == 0.0


def test_newcomers_are_noticed_before_a_question_is_answered_too_late() -> None:
    assert [watch_pause_s(interval_s) for interval_s in (0.0, 8.0, 1e9)] == [1.0, 2.0, 4.0]


SIZE, STEPS, FRAGMENTS = 3, 50, 3
SETTINGS = {"sync_every": 8, "num_fragments": FRAGMENTS, "wire_dtype": "fp32"}


def test_requests_and_bytes_are_those_of_the_formula() -> None:
    """M replicas, F flights: what a replica sends, and what it needs, are exact."""
    began_s, store, by_name = time.monotonic(), MemoryStore(), {}

    def note(diloco: ElasticDiLoCo, step: int) -> None:
        by_name[diloco.transport.log.name] = diloco

    stores = [RecordingStore(store) for _ in range(SIZE)]
    jobs = [Job(one, STEPS, SETTINGS, 60.0, min_replicas=SIZE) for one in stores]
    replicas = [Replica(f"r{i}", i, job, note).start() for i, job in enumerate(jobs)]
    play(replicas)
    kept = store.objects | store.deleted
    flights = [key.split("/")[1] for key in kept if key.startswith("commit/")]
    # 17 are launched after steps 8, 10, 13, 16, ... 50, and each fragment once more at the end
    assert len(flights) == 17 + FRAGMENTS
    sizes = {flight: len(kept[f"x/{flight}/r0"]) for flight in flights}
    for p, fragment in enumerate(by_name["r0"].fragments):
        numel = sum(tensor.numel() for tensor in fragment.local)
        padded = SEAL_BYTES + HEADER_BYTES + 8 * -(-4 * numel // 8)
        assert {size for f, size in sizes.items() if int(f) % FRAGMENTS == p} == {padded}

    commits = []
    for replica, one in zip(replicas, stores, strict=True):
        # a replica sends each of its messages once
        sent = one.those("create", "x/")
        assert sorted(r.key for r in sent) == sorted(f"x/{f}/{replica.name}" for f in flights)
        assert sum(r.sent for r in sent) == sum(sizes.values())
        transport = by_name[replica.name].transport
        assert transport.view.channel.ledger.bytes_sent == sum(sizes.values())
        # it reads the messages of the others once, and the commits of the others
        read = one.those("get", "x/")
        assert len({r.key for r in read}) == len(read) == (SIZE - 1) * len(flights)
        assert sum(r.received for r in read) == (SIZE - 1) * sum(sizes.values())
        won = one.those("create", "commit/")
        assert len(one.those("get", "commit/")) == len(flights) - len(won)
        assert len(one.those("create", "commit/", done=False)) <= len(flights) - len(won)
        commits += [r.key for r in won]
        # a pause between two looks, each of one commit and at most the others' messages
        looks = 2 * len(flights) + (time.monotonic() - began_s) / 0.02
        assert len(one.those("get", "x/", done=False)) <= (SIZE - 1) * looks
        watches = 2 + (time.monotonic() - began_s) / 1.0
        assert len(one.those("get", "commit/", done=False)) <= looks + watches
        # states are put by one of them, which deletes what is old
        counted = [of.counts() for of in (transport.log.store, transport.log.states.store)]
        for verb in set().union(*counted):
            counts = [count[verb] for count in counted if verb in count]
            mine = [r for r in one.requests if r.verb == verb]
            assert sum(count.requests for count in counts) == len(mine)
            assert sum(count.failures for count in counts) == 0
            assert sum(count.sent_bytes for count in counts) == sum(r.sent for r in mine)
            assert sum(count.received_bytes for count in counts) == sum(r.received for r in mine)
    assert sorted(commits) == sorted(f"commit/{flight}" for flight in flights)
    states = [r for one in stores for r in one.those("create", "state/")]
    # the first one, one every four cycles, and the last one; two may have begun, or have ended
    first = {f"state/{replica.name}" for replica in replicas}
    assert {r.key for r in states} - first == {"state/11", "state/end"}
    assert first & {r.key for r in states}
    assert len([r for one in stores for r in one.those("create", "x/")]) == SIZE * len(flights)


def test_the_price_of_a_day_in_the_docs() -> None:
    replicas, fragments, interval_s = 3, 8, 12.5
    exchanges = 86_400 / interval_s
    parts = math.ceil(STATE_BYTES * 100e6 / PART_BYTES)
    puts = 2 + 1 / replicas + (parts + 3) / (4 * fragments * replicas)
    looks = 2 * replicas + 2 * interval_s / watch_pause_s(interval_s)
    gets = 2 * (replicas - 1) + 1 - 1 / replicas + looks
    gets += (replicas + 5) / (4 * fragments * replicas)
    usd = exchanges * (puts * 0.005 + gets * 0.0004) / 1000
    read_gb = 86_400 / 100 * 2 * (replicas - 1) / replicas * 0.05
    page = " ".join((ROOT / "docs/elastic.md").read_text("utf-8").split())
    for text in (
        f"{exchanges:,.0f} exchanges a day",
        f"{puts:.3f} puts and {gets:.2f} gets per exchange on the two-phase route",
        f"{exchanges * puts:,.0f} puts and {exchanges * gets:,.0f} gets a day",
        f"this is {usd:.3f} USD",
        f"{read_gb:.0f} GB for {0.09 * read_gb:.1f} USD a day",
    ):
        assert text in page
