"""System commands of the laboratory: interface counters, processes, namespaces."""

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
GRACE_S = 5.0  # for the other jobs to report an error after one has failed


class LaboratoryUnavailable(RuntimeError):  # noqa: N818 - a state of the machine, not a fault
    """This machine cannot run the laboratory; the message says what is missing."""


class Counters(NamedTuple):
    """Bytes sent and received by an interface since its creation, including headers."""

    sent_bytes: int
    received_bytes: int


def interface_counters(interface: str = INTERFACE) -> Counters:
    """Return the counters of an interface in the network namespace of this process.

    Jobs in the laboratory call it. It reads /proc/self, because /sys/class/net shows the namespace
    in which /sys was mounted.

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
        raise ValueError(f"There is no interface `{interface}`, only {sorted(found)}.")
    return Counters(int(found[interface][8]), int(found[interface][0]))


def wait_for(jobs: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait until all jobs have ended, the timeout, or `GRACE_S` after a job has failed."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while time.monotonic() < deadline:
        codes = [job.poll() for job in jobs]  # poll all of them: `poll` is what detects an end
        if None not in codes:
            return
        if not failed and any(codes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)


@contextmanager
def reaped(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the job and its session on exit if it is still running."""
    try:
        yield
    finally:
        if job.poll() is None:  # it may not be in its namespace yet
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def kill_all_in(namespace: str) -> None:
    """Kill every process in a namespace, including grandchildren in other sessions."""
    for pid in try_command("ip", "netns", "pids", namespace).stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def raise_priority(nice: int) -> None:
    """Run this process's session at a nice value, if this machine has autogroups; needs root.

    With them (`sched_autogroup_enabled`), Linux shares its cores between sessions, and the nice
    value of a process counts within its session only.
    """
    setting = Path("/proc/self/autogroup")
    if setting.exists():
        setting.write_text(str(nice))


def exit_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into `SystemExit`, so that the laboratory is torn down.

    Signals that are ignored, as by `nohup`, stay ignored.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, leave)


def remove_namespace(namespace: str) -> None:
    """Remove a namespace with its processes and interfaces; without it, do nothing."""
    kill_all_in(namespace)
    try_command("ip", "netns", "delete", namespace)


def try_command(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def command_output(*command: str) -> str:
    """Run a setup command and return its stdout.

    Raises:
        LaboratoryUnavailable: it failed; the message contains its stderr.
    """
    result = try_command(*command)
    if result.returncode:
        raise LaboratoryUnavailable(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout
