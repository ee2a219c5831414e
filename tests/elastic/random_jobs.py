"""Draw jobs from seeds, and play them: `python -m tests.elastic.random_jobs FIRST LAST`.

Replicas join, die, stop for a while, get NaN and SIGTERM, in stores that are slow, fail and show
late what others created. Whatever happens, each replica must equal its serial twin.
"""

from __future__ import annotations

import logging
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from lightning_commfree.elastic import states
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from tests.diloco.training import WIDTH
from tests.elastic.log_twin import (
    Job,
    Killed,
    Replica,
    assert_equal_the_twin,
    listed_in,
    play,
)
from tests.elastic.memory_store import MemoryStore
from tests.elastic.scripted_store import Eventual, ScriptedStore, refused
from tests.elastic.turns import Turns
from tests.stores.faulty_store import FaultyStore

WIRES = ("fp32", "bf16", "int8", "fp4", "int2")


class Faults:
    """What happens to one replica: after which steps, and in its requests."""

    def __init__(self, draw: random.Random, turns: Turns, steps: int, mortal: bool) -> None:
        self.turns, self.replica = turns, None
        self.awake_s = 0.0  # until then, it is stopped
        self.step_s = draw.choice((0.0, 0.01, 0.01, 0.02, 0.04))
        self.naps = {draw.randrange(steps): draw.choice((0.05, 0.3, 1.0, 4.0)) for _ in range(2)}
        if draw.random() < 0.5:
            self.naps.clear()
        self.dies_at = draw.randrange(10, 60 * steps // 10) if mortal else None  # request
        requests = [draw.randrange(10, 60 * steps // 10) for _ in range(3)]
        self.leaves_at = {one: draw.choice((0.0, 0.1, 0.5, 4.0)) for one in requests}
        if draw.random() < 0.5:
            self.leaves_at.clear()
        self.poisoned_at = draw.randrange(steps) if draw.random() < 0.1 else None
        self.requests = 0
        self.state_s = 0.0  # how long it takes to create a state
        self.what = f"naps {self.naps}, dies at {self.dies_at}, NaN at {self.poisoned_at}"

    def act(self, diloco: ElasticDiLoCo, step: int) -> None:
        assert self.replica is not None
        self.turns.sleep(self.step_s)
        if seconds := self.naps.get(step):
            self.awake_s = self.turns.now_s + seconds
        if step == self.poisoned_at:
            self.replica.poison(diloco, step % len(diloco.fragments))
        self.nap()

    def nap(self) -> None:
        while self.turns.now_s < self.awake_s:
            self.turns.sleep(self.awake_s - self.turns.now_s)

    def rule(self, verb: str, key: str, request: Callable[[], Any]) -> Any:
        self.nap()
        self.requests += 1
        assert self.replica is not None
        if self.replica.killed:
            raise refused(verb)
        if self.requests in self.leaves_at:
            self.replica.terminate(self.leaves_at[self.requests])
        if self.requests == self.dies_at:
            self.replica.kill()
            if self.requests % 2:  # the request reaches the store, and its answer nobody
                request()
            raise refused(verb)
        if verb == "create" and key.startswith("part/") and key.endswith(".0"):
            self.turns.sleep(self.state_s)
        found = request()
        self.nap()
        return found


def play_random_job(seed: int, turns: Turns) -> Counter[str]:
    """Play a job, compare all replicas with their twins, and count what happened."""
    draw = random.Random(seed)
    fragments, sync_every = draw.randint(1, 3), draw.randint(4, 12)
    changes: dict[str, Any] = {
        "wire_dtype": draw.choice(WIRES),
        "num_fragments": fragments,
        "sync_every": max(sync_every, fragments),
        "overlap_steps": draw.choice((0, 1, 3, sync_every - 1)),
        "nonfinite": "abstain",
    }
    steps = draw.randint(40, 120)
    auto = random.Random(-seed)  # the other draws are as without it
    if is_auto := auto.random() < 0.3:
        changes |= {"sync_every": "auto", "overlap_steps": min(changes["overlap_steps"], 8)}
        steps += 120
    store = MemoryStore()
    job = Job(
        store,
        steps,
        changes,
        grace_s=draw.choice((0.0, 0.05, 0.5)),
        step_s=0.01,
        max_replicas=8,
        state_cycles=draw.choice((1, 2, 4)),
        by_time=draw.random() < 0.25,
        width=draw.choice((WIDTH, WIDTH, 256)),  # from three members on, wide ones own parts
    )
    immortal, mortal = draw.randint(1, 2), draw.randint(0, 3)
    delay_s, fails = draw.choice((0.0, 0.002, 0.02)), draw.choice((0.0, 0.0, 0.05))
    if is_auto:
        delay_s = auto.choice((0.0, 0.02, 0.05))
    late = draw.choice((None, None, 2))
    replicas, starts, all_faults = list[Replica](), list[float](), list[Faults]()
    for i in range(immortal + mortal):
        faults = Faults(draw, turns, steps, mortal=i >= immortal)
        if is_auto:  # a link is measured in steps
            faults.step_s = max(faults.step_s, 0.01)
        faults.state_s = auto.choice((0.0, 0.0, 0.3, 2.0))
        own: Any = FaultyStore(store, refused=fails, lost=fails, delay_s=delay_s, seed=seed + i)
        if late:
            own = ScriptedStore(own, Eventual(late))
        one = Replica(f"r{i}", i % 3, job, faults.act, ScriptedStore(own, faults.rule))
        faults.replica = one
        all_faults.append(faults)
        replicas.append(one)
        starts.append(draw.choice((0.0, 0.0, 0.3, 1.0)) if i else 0.0)
    order = sorted(range(len(replicas)), key=lambda i: starts[i])
    for i in order:
        turns.sleep(max(starts[i] - turns.now_s, 0.0))
        replicas[i].start()
    try:
        play(replicas, 600.0)
    except RuntimeError as error:
        alone = any(faults.poisoned_at is not None for faults in all_faults)
        if not alone or "No replica has finite values" not in str(error):
            raise
        return Counter(jobs=1, ended_by_nan=1)
    ran = [one for one in replicas if one.events]
    twins = assert_equal_the_twin(ran, least_landings=0)
    finals = [one for one in replicas if one.final is not None]
    assert len(finals) >= immortal
    assert "end" in store.objects
    return Counter(
        jobs=1,
        replicas=len(replicas),
        dead=sum(isinstance(one.error, Killed) for one in replicas),
        flights=len(listed_in(store)),
        left_out=sum(len(names) < len(finals) for names in listed_in(store)),
        returned=sum(len(one.continued) for one in ran),
        continued=sum(sum(one.continued) for one in ran),
        paces=max(len(one.paces) for one in twins) - 1,
        states=sum(event[0] == "state" and event[1] >= 0 for one in ran for event in one.events),
    )


def main(first: int, last: int) -> None:
    found: Counter[str] = Counter()
    torch.set_num_threads(1)
    states.PART_BYTES = 20_000  # a state has one part, or some
    logging.disable()
    warnings.simplefilter("ignore")
    for seed in range(first, last + 1):
        try:
            with Turns(seed) as turns:
                found += play_random_job(seed, turns)
        except Exception:  # noqa: BLE001 - the next seeds are played, too
            found["failed"] += 1
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
    print(dict(found))
    raise SystemExit(found["failed"] > 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
