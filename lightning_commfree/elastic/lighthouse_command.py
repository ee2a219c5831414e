"""The `commfree-lighthouse` command: run a lighthouse for elastic replicas, or list its replicas.

::

    commfree-lighthouse --bind 10.0.0.1
    commfree-lighthouse status http://10.0.0.1:29510

The first command runs a lighthouse until it is interrupted. A lighthouse needs no saved state:
replicas wait while it is down, and continue when it is running again. The second command prints a
table of all replicas every second.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from lightning_commfree.elastic.board import ABSENT_STEP, Board, get_text, read_board
from lightning_commfree.elastic.lighthouse import serve_lighthouse

PORT = 29510
_REFRESH_S = 1.0
_FORGET_S = 300.0  # time after which a dead replica is no longer listed
_CLEAR = "\x1b[H\x1b[J"  # move the cursor to the top left, and clear the screen
_COLUMNS = ("replica", "heartbeat", "step", "steps/s", "stalled", "sent")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a lighthouse, or print the table of its replicas; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["status"]:
        return _status(given[1:])
    return _serve(given)


def serve_parser() -> argparse.ArgumentParser:
    """Create the argument parser of the command that runs a lighthouse."""
    parser = argparse.ArgumentParser(
        prog="commfree-lighthouse",
        description="Run a lighthouse, the rendezvous of elastic replicas, until interrupted."
        " `commfree-lighthouse status [URL]` shows the replicas of a running lighthouse.",
    )
    add = parser.add_argument
    add(
        "--bind",
        default="127.0.0.1",
        help="address to listen on, in the private network that the replicas share"
        " (default: %(default)s, this machine only)",
    )
    add("--port", type=int, default=PORT, help="default: %(default)s")
    add("--min-replicas", type=int, default=1, help="replicas to wait for (default: %(default)s)")
    add(
        "--join-timeout",
        type=float,
        default=60.0,
        help="seconds that an exchange waits for a replica that is alive but late, before it goes"
        " ahead without that replica (default: %(default)s)",
    )
    add(
        "--heartbeat-timeout",
        type=float,
        default=5.0,
        help="seconds without a heartbeat after which a replica counts as gone; replicas send one"
        " per second (default: %(default)s)",
    )
    return parser


def _serve(arguments: Sequence[str]) -> int:
    parser = serve_parser()
    options = parser.parse_args(arguments)
    try:
        server = serve_lighthouse(
            options.bind,
            options.port,
            options.min_replicas,
            options.join_timeout,
            options.heartbeat_timeout,
        )
    except (ModuleNotFoundError, OSError, ValueError) as error:
        parser.error(str(error))
    ended = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: ended.set())
    print(
        f"Lighthouse: http://{options.bind}:{options.port}. Anyone who can reach this port can"
        " read, stop and change the training (SECURITY.md).",
        flush=True,
    )
    while not ended.wait(_REFRESH_S):
        pass
    server.shutdown()
    return 0


def _status(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="commfree-lighthouse status", description="Show the replicas of a lighthouse."
    )
    parser.add_argument("url", nargs="?", default=f"http://127.0.0.1:{PORT}")
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    options = parser.parse_args(arguments)
    is_live = sys.stdout.isatty() and not options.once
    while True:
        try:
            lines = table(options.url, read_board(options.url))
        except ConnectionError as error:
            if not is_live:
                parser.error(str(error))
            lines = [str(error)]
        print(_CLEAR if is_live else "", *lines, sep="\n", flush=True)
        if options.once:
            return 0
        try:
            time.sleep(_REFRESH_S)
        except KeyboardInterrupt:
            return 0


def table(url: str, board: Board) -> list[str]:
    """Fetch a progress report from every live member, and return the status table's lines."""
    members = {member.replica_id: member for member in board.members}
    rows = [_COLUMNS]
    for name in sorted({*board.heartbeats, *members}):
        age = board.heartbeats.get(name, 0.0)
        is_gone = name in board.silent or (name in members and members[name].step == ABSENT_STEP)
        if name in members and not is_gone:
            found = _report(members[name].address, str(members[name].step))
        elif age > _FORGET_S:
            continue
        else:
            found = ("gone" if is_gone else "joining", "-", "-", "-")
        rows.append((_plain(name), f"{age:.1f} s ago", *found))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return [f"{url}: quorum {board.quorum_id}, {_plain(board.reason)}", *lines]


def _report(address: str, step: str) -> tuple[str, str, str, str]:
    """Fetch a replica's step, speed, stalled time and bytes sent, formatted for the status table.

    If the replica does not respond, return the given `step`, and "-" for the other values.
    """
    try:
        report: Any = json.loads(get_text(address, "/report", 1.0))
        return (
            f"{int(report['step'])}",
            f"{float(report['steps_per_second']):.2f}",
            f"{float(report['stalled_seconds']):.1f} s",
            f"{float(report['sent_bytes']) / 1e6:.1f} MB",
        )
    except (ConnectionError, ValueError, KeyError, TypeError):
        return step, "-", "-", "-"


def _plain(text: str) -> str:
    """Return the first 200 printable characters of a text from the network.

    Other characters could control the terminal.
    """
    return "".join(filter(str.isprintable, text))[:200]


if __name__ == "__main__":
    sys.exit(main())
