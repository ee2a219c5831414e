"""Tables of two papers about bandwidth, which `benchmarks.planner` compares with."""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    """A model size of the simulation."""

    params: float
    layers: int
    step_seconds: float


TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)  # utilizations

# arXiv:2501.18512, Table 4: layers and seconds per step as printed, parameters from their names
SIZES = {
    "1B": Size(1e9, 24, 0.1),
    "10B": Size(1e10, 48, 0.8),
    "100B": Size(1e11, 108, 4.9),
}

# arXiv:2501.18512, Table 4: Gbit/s for TARGETS, H = 100, 3 layers per fragment
TABLE_4 = {
    "Data-Parallel": {
        "1B": (86.8, 152.6, 184.2, 222.3, 569.0),
        "10B": (104.8, 222.3, 222.3, 268.3, 471.5),
        "100B": (184.2, 323.8, 390.7, 390.7, 471.5),
    },
    "DiLoCo": {
        "1B": (1.4, 6.2, 13.3, 23.3, 86.8),
        "10B": (1.7, 7.5, 16.0, 33.9, 104.8),
        "100B": (3.0, 11.0, 23.3, 49.4, 184.2),
    },
    "Streaming": {
        "1B": (1.4, 5.2, 9.1, 16.0, 28.1),
        "10B": (1.7, 5.2, 9.1, 13.3, 19.3),
        "100B": (2.4, 6.2, 9.1, 11.0, 19.3),
    },
    "+ overlap": {
        "1B": (1.4, 4.3, 6.2, 9.1, 11.0),
        "10B": (1.7, 3.6, 5.2, 6.2, 7.5),
        "100B": (1.7, 3.6, 4.3, 5.2, 5.2),
    },
    "+ FP4": {
        "1B": (0.4, 0.9, 1.7, 2.0, 3.0),
        "10B": (0.4, 0.9, 1.4, 1.4, 1.7),
        "100B": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}

# arXiv:2503.09799, Table 6: Gbit/s for TARGETS, DiLoCo, by H
DILOCO_BY_SYNC_EVERY = {
    10: (16.0, 49.4, 86.8, 152.6, 222.3),
    50: (3.0, 11.0, 23.3, 41.0, 126.5),
    100: (1.4, 6.2, 13.3, 23.3, 86.8),
    300: (0.5, 2.0, 4.3, 9.1, 41.0),
}

# arXiv:2501.18512, Table 1: hours at infinite bandwidth and at 1 Gbit/s, 25B, 100B, 250B tokens
HOURS = {
    "Data-Parallel": ((0.67, 109.0), (2.7, 438.0), (6.75, 1097.0)),
    "+ FP4": ((0.67, 0.88), (2.7, 3.5), (6.75, 8.75)),
}
