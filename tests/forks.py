"""Run commands and jobs as forks of the test process, which has already imported everything.

A new Python takes seconds to import Lightning. A test that is not about starting Python replaces a
module's `subprocess` with `forking`, and a `NetLab` with a `ForkedLab`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.context import ForkProcess
from types import SimpleNamespace
from typing import IO, Any

from hydra.core.global_hydra import GlobalHydra
from torch.distributed import run as torchrun

from benchmarks.lab import NetLab

# of linux/sched.h; `os.setns` and `os.unshare` come with Python 3.12
CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUTS = 0x4000_0000, 0x0002_0000, 0x0400_0000


class Fork(ForkProcess):
    """A forked process, used like a `Popen`.

    It runs `[function, *arguments]` or `[python, *words]`. Its output and errors go to
    `stdout`; `first` is called before anything else.
    """

    def __init__(
        self,
        command: Sequence[Any],
        cwd: Any = None,
        env: Mapping[str, str] | None = None,
        stdout: IO[Any] | None = None,
        first: Callable[[], None] | None = None,
        **_: Any,
    ) -> None:
        super().__init__(target=self._play, args=(command, cwd, env, stdout, first))
        self.start()

    @staticmethod
    def _play(
        command: Sequence[Any],
        cwd: Any,
        env: Mapping[str, str] | None,
        stdout: IO[Any] | None,
        first: Callable[[], None] | None,
    ) -> None:
        os.setsid()
        for stream in (1, 2) if stdout else ():
            os.dup2(stdout.fileno(), stream)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - until it ends
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        if first is not None:
            first()
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
            sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
        os.chdir(cwd or ".")
        play, *words = command
        (run_python if play == sys.executable else play)(*words)

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return self.exitcode

    def end(self, limit_s: float) -> int | None:
        """Wait for the end; after `limit_s`, kill the process and its ranks and raise an error."""
        try:
            return self.wait(limit_s)
        except subprocess.TimeoutExpired:
            assert self.pid, "it has started"
            os.killpg(self.pid, signal.SIGKILL)  # it leads a group of its own
            raise

    def send_signal(self, number: int) -> None:
        if self.exitcode is None and self.pid is not None:
            os.kill(self.pid, number)


def run_python(*words: str) -> None:
    """Run `-m module` or a script, with its arguments, as `python` would."""
    GlobalHydra.instance().clear()  # left by the process that was forked
    is_module, sys.argv = words[0] == "-m", [*words]
    if is_module:
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def run_typed(command: str) -> None:
    """Run a documented command, optionally with variables before it, as a shell would."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    while "=" in words[0]:
        name, _, os.environ[name] = words.pop(0).partition("=")
    program, *words = words
    {"python": run_python, "torchrun": run_torchrun}[program](*words)


def run_torchrun(*words: str) -> None:
    """Be torchrun's agent of a machine, whose ranks are forks of it."""
    read = torchrun.config_from_args

    def forking_ranks(options: Any) -> Any:
        config, _, (unbuffered, *started) = read(options)
        assert unbuffered == "-u", "the interpreter's option; a script or `-m module` follows"
        config.start_method = "fork"
        return config, run_python, started

    torchrun.config_from_args = forking_ranks  # in this forked process only
    torchrun.main(words)


def run_forked(command: Sequence[Any], check: bool = False, **kwargs: Any) -> Any:
    """Run a command of this Python like `subprocess.run`, without capturing its output."""
    done = subprocess.CompletedProcess(command, Fork(command, **kwargs).wait())
    if check:
        done.check_returncode()
    return done


forking = SimpleNamespace(**{**vars(subprocess), "Popen": Fork, "run": run_forked})


class ForkedLab(NetLab):
    """A laboratory whose jobs are `Fork`s."""

    def start(
        self, node: int, command: Sequence[Any], env: Mapping[str, str], log: IO[bytes]
    ) -> Any:
        own = {} if self._fresh else self.environment(node)
        move = partial(ForkedLab._move_to, self, node)
        return Fork(command, env={**os.environ, **own, **env}, stdout=log, first=move)

    def _move_to(self, node: int) -> None:
        """Give this process the interface, name and hosts file of a node."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._namespace(node)}") as space:
            if libc.setns(space.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS | CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), "setns or unshare")
        socket.sethostname(self.names[node])
        for words in (["--make-rprivate", "/"], ["--bind", str(self._hosts(node)), "/etc/hosts"]):
            subprocess.run(["mount", *words], check=True)
