"""torchft's lighthouse, which serves when its file exists: `python -m benchmarks.chaos.lighthouse`.

Its imports are done by then, so a second one can replace the first after a given time.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from torchft.coordination import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    LighthouseServer,
)

_JOIN_TIMEOUT_MS = 10_000  # as in torchft's examples
_POLL_S = 0.02

if __name__ == "__main__":
    file, bind, min_replicas, heartbeat_timeout_s = sys.argv[1:]
    while not Path(file).exists():
        time.sleep(_POLL_S)
    while True:
        try:
            server = LighthouseServer(
                bind=bind,
                min_replicas=int(min_replicas),
                join_timeout_ms=_JOIN_TIMEOUT_MS,
                heartbeat_timeout_ms=round(1e3 * float(heartbeat_timeout_s)),
            )
            break
        except RuntimeError:  # the process that was killed still holds the port
            time.sleep(_POLL_S)
    signal.pause()
