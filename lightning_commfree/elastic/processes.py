"""Whether a process on this machine has ended, so that nobody needs to wait for its answer."""

from __future__ import annotations

import os
from pathlib import Path

_ENDED = "ZX"  # states of a process that has ended and is still in the table


def this_process() -> str:
    """Identify this process among those of all machines; "" where that is impossible."""
    try:
        return f"{_machine()} {os.getpid()} {_stat(os.getpid())[1]}"
    except OSError:  # not Linux
        return ""


def has_ended(process: str) -> bool:
    """Return whether a process of `this_process` has ended.

    False if that is not known, as for a process on another machine or in another container.
    """
    try:
        *machine, pid, began = process.split(" ")
        if machine != [_machine()]:
            return False
        os.kill(int(pid), 0)  # signal 0 is not sent
        state, begun = _stat(int(pid))
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # another user's, or not Linux
        return False
    return state in _ENDED or begun != began


def _machine() -> str:
    """Identify this machine since it was booted, and the process's container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[str, str]:
    """Return the state of a process, and when it began in ticks since the boot: 3 and 22 of `stat`.

    The second field is the program's name, in parentheses, and may contain anything.
    """
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return fields[0], fields[19]
