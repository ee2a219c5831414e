"""The `commfree-store` command: `commfree-store serve --bind 10.0.0.1:29510` serves a tcp store."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from lightning_commfree.stores.store import host_and_port


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a store in this process's memory until SIGINT or SIGTERM; return the exit status."""
    parser = argparse.ArgumentParser(prog="commfree-store", description="Serve a store by TCP.")
    serving = parser.add_subparsers(dest="command", required=True).add_parser("serve")
    serving.add_argument(
        "--bind",
        default="127.0.0.1:29510",
        metavar="HOST:PORT",
        help="address in the private network of the replicas (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    ended = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: ended.set())
    from lightning_commfree.stores.tcp import serve  # here: --help does not wait for torch

    try:
        server = serve(*host_and_port(options.bind))
    except (OSError, ValueError) as error:
        serving.error(f"Cannot serve at {options.bind}: {error}")
    print(
        f"Store: tcp://{options.bind}. Anyone who reaches it can change the training.", flush=True
    )
    while not ended.wait(1.0):
        pass
    del server
    return 0


if __name__ == "__main__":
    sys.exit(main())
