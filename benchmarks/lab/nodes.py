"""What the laboratory does on the command line of the host: counters, jobs that end, namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

INTERFACE = "eth0"
GRACE_S = 5.0  # for the others, once one job has failed, to say what they noticed


class LaboratoryUnavailable(RuntimeError):  # noqa: N818 - a state of the machine, not a fault
    """This machine cannot make the laboratory; the text says what is missing."""


class Counters(NamedTuple):
    """Bytes that an interface has sent and received since its node was made, with headers."""

    sent_bytes: int
    received_bytes: int


def interface_counters(interface: str = INTERFACE) -> Counters:
    """Return the counters of an interface in the network namespace of this process.

    A job in the laboratory calls it at moments of its own choice. /proc/self follows the process,
    while /sys/class/net shows the namespace that it was mounted in.

    Raises:
        ValueError: there is no such interface.
    """
    return parse_counters(Path("/proc/self/net/dev").read_text(), interface)


def parse_counters(table: str, interface: str) -> Counters:
    """Return the counters of an interface from the text of /proc/net/dev.

    Raises:
        ValueError: there is no such interface.
    """
    rows = dict(line.split(":", 1) for line in table.splitlines() if ":" in line)
    found = {name.strip(): numbers.split() for name, numbers in rows.items()}
    if interface not in found:
        raise ValueError(f"There is no interface `{interface}` here, only {sorted(found)}.")
    return Counters(int(found[interface][8]), int(found[interface][0]))


def wait_for(jobs: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Return when all have ended, at the timeout, or `GRACE_S` after one has failed."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while time.monotonic() < deadline:
        codes = [job.poll() for job in jobs]  # of all of them: `poll` is what notices an end
        if None not in codes:
            return
        if not failed and any(codes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)


@contextmanager
def reaped(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the job, if it has not ended, on the way out. It leads a session of its own."""
    try:
        yield
    finally:
        if job.poll() is None:  # it may not have entered its namespace yet
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def kill_all_in(namespace: str) -> None:
    """Kill every process of a namespace of ours: grandchildren too, whatever session they chose."""
    for pid in try_command("ip", "netns", "pids", namespace).stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def exit_on_signals() -> None:
    """Let SIGTERM, and SIGHUP of a terminal that is gone, end this process like an error.

    So that a laboratory is taken down on the way. What `nohup` ignores stays ignored.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, leave)


def remove_namespace(namespace: str) -> None:
    """Remove a namespace of ours with its processes and interfaces; one that is not there too."""
    kill_all_in(namespace)
    try_command("ip", "netns", "delete", namespace)


def try_command(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def command_output(*command: str) -> str:
    """Run a command of the set-up and return its stdout.

    Raises:
        LaboratoryUnavailable: it failed; with what it said.
    """
    result = try_command(*command)
    if result.returncode:
        raise LaboratoryUnavailable(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout
