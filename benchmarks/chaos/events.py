"""What happens to the replicas, and when: a function of the seed."""

from __future__ import annotations

import random
from typing import NamedTuple

from benchmarks.chaos.plan import REPLICAS

KILL, SLOW, TERM, STOP, CUT, MEETING = (
    "SIGKILL",
    "SIGKILL, late restart",
    "SIGTERM",
    "SIGSTOP",
    "partition",
    "outage of the meeting point",
)
KILLS = 3  # come first, so that the seconds to the target loss have only these in them
_FIRST_KILL, _BETWEEN_KILLS = 0.06, 0.11  # shares of the run
_FIRST_OTHER, _BETWEEN_OTHERS = 0.45, 0.115  # usually, one replica is back before the next is hit
_JITTER = 0.03
_AWAY_S = {SLOW: (6.0, 6.0), STOP: (4.0, 6.0), CUT: (4.0, 6.0), MEETING: (1.0, 3.0)}


class Event(NamedTuple):
    """A disturbance, in seconds after all replicas train."""

    at_s: float
    kind: str
    replica: int  # -1: none
    lasts_s: float  # SIGSTOP: until SIGCONT; late restart: the new process waits as long

    def __str__(self) -> str:
        whom = "" if self.replica < 0 else f" of replica {self.replica}"
        return f"{self.kind}{whom}" + (f", {self.lasts_s:.1f} s" if self.lasts_s else "")


def schedule(seed: int, seconds: float) -> list[Event]:
    """Return the events of a run, in order.

    Args:
        seed: of times, order and replicas.
        seconds: length of the run; all times are in proportion to it.
    """
    chance = random.Random(seed)
    kinds = [SLOW, TERM, STOP, CUT, MEETING]
    chance.shuffle(kinds)
    shares = [_FIRST_KILL + i * _BETWEEN_KILLS for i in range(KILLS)]
    shares += [_FIRST_OTHER + i * _BETWEEN_OTHERS for i in range(len(kinds))]
    hit = chance.sample(range(REPLICAS), KILLS)  # each replica once
    for kind in kinds:  # no replica twice in a row: its process may not be back yet
        last = next(replica for replica in reversed(hit) if replica >= 0)
        others = [replica for replica in range(REPLICAS) if replica != last]
        hit.append(-1 if kind == MEETING else chance.choice(others))
    return [
        Event(
            seconds * (share + _JITTER * chance.random()),
            kind,
            replica,
            chance.uniform(*_AWAY_S.get(kind, (0.0, 0.0))),
        )
        for share, kind, replica in zip(shares, [KILL] * KILLS + kinds, hit, strict=True)
    ]
