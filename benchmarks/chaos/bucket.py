"""A bucket in memory: `python -m benchmarks.chaos.bucket HOST PORT NAME`.

moto honors conditional writes, but answers in about 20 ms, one request at a time.
"""

from __future__ import annotations

import signal
import sys
import urllib.request

from moto.server import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    ThreadedMotoServer,
)

if __name__ == "__main__":
    host, port, name = sys.argv[1:]
    ThreadedMotoServer(host, int(port), verbose=False).start()
    # replicas that ask before this repeat their requests
    request = urllib.request.Request(f"http://{host}:{port}/{name}", method="PUT")
    urllib.request.urlopen(request).close()
    signal.pause()
