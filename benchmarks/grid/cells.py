"""The cells of the grid: links, and the rows that run over each of them."""

from __future__ import annotations

from dataclasses import dataclass

NODES = 4
SYNC_EVERY = 128  # H
OVERLAP = 5  # steps, of Streaming DiLoCo, as on the page of benchmarks.bandwidth
STEP_S = 0.0261  # the wait that takes the place of a step's computation
# the model of diloco-measured: 6 Llama blocks of width 256, embedding and head of 50,257 tokens
WIDTH, INNER, BLOCKS, HEADS, VOCABULARY = 256, 768, 6, 16, 50_257
BLOCK_PARAMETERS = 4 * WIDTH**2 + 3 * WIDTH * INNER + 2 * WIDTH
OTHER_PARAMETERS = 2 * VOCABULARY * WIDTH + WIDTH  # embedding, head, last norm
TENSORS = 9 * BLOCKS + 3

# rows that send, and the row of the same loop that does not
BASELINES = {"ours": "none", "diloco": "none", "torchft": "loop"}
LABELS = {
    "ours": "Streaming DiLoCo",
    "diloco": "plain DiLoCo",
    "torchft": "torchft's DiLoCo",
}
# utilization of DiLoCo by diloco-measured (github.com/Adnan082/diloco-measured, H = 128)
PUBLISHED = {50: 0.1155, 200: 0.3609, 1000: 0.7152, 5000: 0.87}
TOLERANCE = 0.03  # of utilization: a prediction within 3 points is a hit
PRIORITY = "GRID_NICE"  # variable: the nice value of the jobs, `--nice`


@dataclass(frozen=True)
class Cell:
    """One link.

    Args:
        mbit: of every node's link; None: unshaped.
        round_trip_ms: between two nodes; above 0, packets go through the relay.
        congestion: TCP's congestion control.
    """

    mbit: int | None
    round_trip_ms: int = 0
    congestion: str = "cubic"

    @property
    def rate(self) -> str | None:
        """The rate in the format of `tc`."""
        return None if self.mbit is None else f"{self.mbit}mbit"

    @property
    def loss(self) -> float:
        """Share of the packets that are lost."""
        return 0.001 if self.round_trip_ms else 0.0

    @property
    def name(self) -> str:
        """The name in tables and files."""
        if self.mbit is None:
            return "unshaped"
        if not self.round_trip_ms:
            return f"{self.mbit:,} Mbit/s"
        return f"{self.mbit} Mbit/s, {self.round_trip_ms} ms, 0.1 % loss, {self.congestion}"

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows that run in this cell, in order."""
        if self.congestion == "bbr":
            return ("ours", "diloco")
        return ("ours", "diloco", "torchft")

    def plan(self) -> list[tuple[str, int, bool]]:
        """Return the job: rows, their measured cycles, and whether an exchange warms up first.

        A warm-up takes as long as the exchanges of a cycle. Where these take minutes, the one-time
        costs of a first exchange are below a percent of it.
        """
        slow = bool(self.round_trip_ms) or (self.mbit or 1000) < 200
        cycles = 2 if slow or self.mbit == 200 else 3
        plan = [("none", 1, False), ("ours", cycles, True)]
        plan.append(("diloco", 1 if slow else cycles, not slow))
        if "torchft" in self.rows:
            plan += [("loop", 1, False), ("torchft", 1 if slow else cycles, not slow)]
        return plan


UNSHAPED = Cell(None)
FAST = [Cell(mbit) for mbit in PUBLISHED]
WIDE = [Cell(50, ms, congestion) for ms in (50, 200) for congestion in ("cubic", "bbr")]
CAPACITY = Cell(200, 50, "bbr")  # probed only: whether the relay could carry more
