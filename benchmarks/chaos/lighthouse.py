"""A lighthouse that serves when its file exists: `python -m benchmarks.chaos.lighthouse FILE ...`.

Its imports are done by then, so a second one can replace the first after a given time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torchft.coordination  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: F401

from lightning_commfree.elastic.lighthouse_command import main

_POLL_S = 0.02
_USAGE = 2  # exit code also for a port that is in use

if __name__ == "__main__":
    while not Path(sys.argv[1]).exists():
        time.sleep(_POLL_S)
    while True:
        try:
            sys.exit(main(sys.argv[2:]))
        except SystemExit as end:
            if end.code != _USAGE:
                raise
        time.sleep(_POLL_S)  # the process that was killed still holds the port
