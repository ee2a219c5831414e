"""The `commfree-store` command.

::

    commfree-store serve --bind 10.0.0.1:29510    # serve a tcp store
    commfree-store status file:///mnt/share/run1  # show the elastic job in a store
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Sequence

from lightning_commfree.stores.store import StoreError, StoreLostError, host_and_port, open_store

_CLEAR = "\x1b[H\x1b[2J"  # of a terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a store until SIGINT or SIGTERM, or show a job; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="commfree-store", description="Serve a store by TCP, or show the job in a store."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="serve a store in this process's memory")
    serving.add_argument(
        "--bind",
        default="127.0.0.1:29510",
        metavar="HOST:PORT",
        help="address in the private network of the replicas (default: %(default)s)",
    )
    status = commands.add_parser("status", help="show the elastic job in a store; only reads")
    status.add_argument("store", metavar="STORE", help="URL, such as file:///mnt/share/run1")
    status.add_argument(
        "--every", type=_seconds, metavar="SECONDS", help="show it again and again, until Ctrl-C"
    )
    options = parser.parse_args(arguments)
    command, run = (serving, _serve) if options.command == "serve" else (status, _show_job)
    try:
        return run(options)
    except KeyboardInterrupt:
        return 0
    except (ModuleNotFoundError, StoreError, StoreLostError, ValueError) as error:
        command.error(str(error))


def _serve(options: argparse.Namespace) -> int:
    ended = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: ended.set())
    from lightning_commfree.stores.tcp import serve

    try:
        server = serve(*host_and_port(options.bind))
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot serve at {options.bind}: {error}") from error
    print(
        f"Store: tcp://{options.bind}. Anyone who reaches it can change the training.", flush=True
    )
    while not ended.wait(1.0):
        pass
    del server
    return 0


def _show_job(options: argparse.Namespace) -> int:
    # here, because only this command knows what replicas keep in a store
    from lightning_commfree.elastic.status import JobWatch, table

    watch = JobWatch(open_store(options.store))
    while True:
        try:
            status = watch.look()
        except StoreError as error:
            if options.every is None:
                raise
            text = str(error)  # an outage ends
        else:
            text = f"There is no job in {options.store}: no replica has started with this store."
            if status is not None:
                text = table(status, watch.per_minute())
        if options.every is None:
            print(text)
            return 0 if status else 1
        print(f"{_CLEAR if sys.stdout.isatty() else ''}{text}", flush=True)
        time.sleep(options.every)


def _seconds(text: str) -> float:
    """Parse a positive number of seconds; raise argparse's error for other text."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
