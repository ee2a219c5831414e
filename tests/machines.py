"""Jobs of a laboratory as forks of the test process, which has imported everything already."""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkProcess
from typing import IO, Any

from benchmarks.lab import NetLab

CLONE_NEWNET = 0x4000_0000  # of linux/sched.h; `os.setns` comes with Python 3.12


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
    """A laboratory that forks `[function, *arguments]` and `[python, "-m", module, *words]`.

    A fork has a node's interface and environment, but this machine's name and /etc/hosts.
    """

    def start(
        self, node: int, command: Sequence[Any], env: Mapping[str, str], log: IO[bytes]
    ) -> Any:
        play, *words = command
        if list(command[:2]) == [sys.executable, "-m"]:
            play, words = _run_module, command[2:]
        environment = {**self.environment(node), **env}
        arguments = (self._namespace(node), environment, log.fileno(), play, words)
        job = _Job(target=_play, args=arguments)
        job.start()
        return job


def _run_module(module: str, *words: str) -> None:
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _play(
    namespace: str, environment: dict[str, str], log: int, play: Callable[..., None], words: Any
) -> None:
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout, sys.stderr = (
        open(n, "w", buffering=1, closefd=False)  # noqa: SIM115 - until it ends
        for n in (1, 2)
    )
    play(*words)
