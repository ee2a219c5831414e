"""Jobs of a laboratory as forks of the test process, which has imported everything already."""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkProcess
from typing import IO, Any

from benchmarks.lab import NetLab

# of linux/sched.h; `os.setns` and `os.unshare` come with Python 3.12
CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUTS = 0x4000_0000, 0x0002_0000, 0x0400_0000


class _Job(ForkProcess):
    """A fork with what a laboratory asks of a `Popen`."""

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int | None:
        self.join()
        return self.exitcode


class ForkedLab(NetLab):
    """A laboratory that forks `[function, *arguments]` and `[python, "-m", module, *words]`."""

    def start(
        self, node: int, command: Sequence[Any], env: Mapping[str, str], log: IO[bytes]
    ) -> Any:
        play, *words = command
        if list(command[:2]) == [sys.executable, "-m"]:
            play, words = run_module, command[2:]

        def job() -> None:
            os.setsid()
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - until it ends
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            self._move_to(node)
            os.environ.update({**({} if self._fresh else self.environment(node)), **env})
            play(*words)

        started = _Job(target=job)
        started.start()
        return started

    def _move_to(self, node: int) -> None:
        """Give this process the interface, name and hosts file of a node."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._namespace(node)}") as space:
            if libc.setns(space.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS | CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), "setns or unshare")
        socket.sethostname(self.names[node])
        for words in (["--make-rprivate", "/"], ["--bind", str(self._hosts(node)), "/etc/hosts"]):
            subprocess.run(["mount", *words], check=True)


def run_module(module: str, *words: str) -> None:
    """Do what `python -m module` does with these words."""
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
