"""The processes of one run, in a network laboratory, and their disturbances.

Each replica has a node. A further node, which nothing happens to, has what a job must not lose: the
store, torchft's lighthouse, or torchrun. Our replicas and those of torchft are started again here,
one by one; those of the other methods by torchrun, all at once.
"""

from __future__ import annotations

import heapq
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.chaos.events import CUT, MEETING, SLOW, STOP, TERM, Event
from benchmarks.chaos.goodput import Window
from benchmarks.chaos.plan import (
    FOLDER,
    LEAST,
    REPLICA,
    REPLICAS,
    RESTARTED,
    S3,
    TCP,
    Plan,
    Process,
    read_logs,
    read_pid,
)
from benchmarks.lab import NetLab

SERVICES = REPLICAS  # node of the store, the lighthouse or torchrun
MEETING_PORT, TORCHRUN_PORT = 29510, 29400
STORE_MODULE, BUCKET_MODULE, BUCKET = (
    "lightning_commfree.stores.command",
    "benchmarks.chaos.bucket",
    "chaos",
)
TERM_S = 5.0  # from SIGTERM to SIGKILL
START_LIMIT_S = 90.0  # until all replicas train
_POLL_S = 0.05
# set by the laboratory for a job of one process per node, which these are not
_SET = "RANK GROUP_RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
_UNSET = [word for name in [*_SET.split(), "TORCHELASTIC_RUN_ID"] for word in ("-u", name)]


class Outcome(NamedTuple):
    """The result of a run."""

    window: Window
    events: list[Event]  # that took place
    timeline: list[str]
    logs: dict[int, list[Process]]
    alive: set[int]  # ids of the processes at the end
    folder: Path


def run(plan: Plan, folder: Path, rate: str, events: Sequence[Event], seconds: float) -> Outcome:
    """Run all replicas, disturb them, and end every process.

    Args:
        plan: of the run; addresses, meeting point and end are set here.
        folder: empty, absolute.
        rate: of the links.
        events: in seconds after all replicas train.
        seconds: in which all replicas train.

    Raises:
        LaboratoryUnavailable: this machine cannot run the laboratory.
        RuntimeError: the replicas do not train.
    """
    with NetLab(REPLICAS + 1, rate) as lab, ExitStack() as files:
        plan = plan._replace(
            meeting=_meeting(plan.method, folder, _address(lab)),
            addresses=[lab.address(replica) for replica in range(REPLICAS)],
            ends_s=time.time() + START_LIMIT_S + seconds,
        )
        job = _Job(lab, plan, folder, files)
        try:
            return job.play(events, seconds)
        finally:
            job.end()


def _address(lab: NetLab) -> str:
    return f"{lab.address(SERVICES)}:{MEETING_PORT}"


def _meeting(method: str, folder: Path, address: str) -> str:
    """Return the URL of what the replicas of a method meet in."""
    if method == FOLDER:
        return (folder / "store").as_uri()
    if method == S3:
        return f"s3://{BUCKET}/run"
    return f"{'tcp' if method == TCP else 'http'}://{address}"


class _Job:
    def __init__(self, lab: NetLab, plan: Plan, folder: Path, files: ExitStack) -> None:
        self._lab, self._plan, self._folder, self._files = lab, plan, folder, files
        self._address = _address(lab)
        self._replicas: dict[int, subprocess.Popen[bytes]] = {}
        self._torchruns: list[subprocess.Popen[bytes]] = []
        self._servers: list[subprocess.Popen[bytes]] = []  # of the store or the lighthouse
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()  # so that acts at the same time need no order
        self._events: list[Event] = []
        self._timeline: list[str] = []
        self._begun_s = time.time()

    def play(self, events: Sequence[Event], seconds: float) -> Outcome:
        (self._folder / "plan.json").write_text(json.dumps(self._plan))
        if self._plan.method in RESTARTED:
            self._torchrun()
        else:
            self._start_meeting()
            for replica in range(REPLICAS):
                self._start(replica)
        self._wait_for_training()

        for event in events:
            self._at(event.at_s, partial(self._disturb, event))
        while (now_s := time.time() - self._begun_s) < seconds:
            while self._due and self._due[0][0] <= now_s:
                heapq.heappop(self._due)[2]()
            self._start_ended()
            time.sleep(_POLL_S)
        window = Window(self._begun_s, time.time())
        pids = (read_pid(self._folder, replica) for replica in range(REPLICAS))
        alive = {pid for pid in pids if pid is not None}
        # of each replica, some rows may be later than the window
        return Outcome(
            window, self._events, self._timeline, read_logs(self._folder), alive, self._folder
        )

    def end(self) -> None:
        """End what was started here; the laboratory ends what that has started."""
        for process in self._started:
            process.kill()
            process.wait()

    # -- processes

    def _start(self, replica: int) -> None:
        command = ["env", *_UNSET, *self._python("replica", str(self._folder))]
        log = self._log(f"{replica}.log")
        env = {"OMP_NUM_THREADS": "1", "RUST_LOG": "warn", REPLICA: str(replica)}
        if self._plan.method == S3:
            env |= {
                "AWS_ENDPOINT": f"http://{self._address}",
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
            }
        self._replicas[replica] = self._lab.start(replica, command, env, log)

    def _start_ended(self) -> None:
        for replica, process in self._replicas.items():
            if (code := process.poll()) is not None:
                self._note(f"replica {replica} exits with code {code} and is started again")
                self._start(replica)

    def _torchrun(self) -> None:
        worker = self._folder / "worker.sh"  # rank i enters node i
        cases = [f'{i}) exec {shlex.join(self._lab.enter(i))} "$@" ;;' for i in range(REPLICAS)]
        worker.write_text("\n".join(["case $RANK in", *cases, "esac", ""]))
        host = self._lab.address(SERVICES)
        command = [
            *["env", *_UNSET, sys.executable, "-m", "torch.distributed.run", "--nnodes=1"],
            *[f"--nproc-per-node={REPLICAS}", "--max-restarts=1000", "--rdzv-backend=c10d"],
            *[f"--rdzv-endpoint={host}:{TORCHRUN_PORT}", f"--local-addr={host}"],
            *["--monitor-interval=0.1", "--no-python"],
            *["sh", str(worker), *self._python("replica", str(self._folder))],
        ]
        # torch 2.13 keeps one store over all restarts, with the addresses of dead processes: gloo
        # then cannot connect
        env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._torchruns.append(self._lab.start(SERVICES, command, env, self._log("torchrun.log")))

    def _start_meeting(self) -> None:
        plan, address = self._plan, self._address
        if plan.method == FOLDER:
            (self._folder / "store").mkdir()
        elif plan.method == TCP:
            self._serve("store", "-m", STORE_MODULE, "serve", "--bind", address)
        elif plan.method == S3:
            self._serve("store", "-m", BUCKET_MODULE, *address.split(":"), BUCKET)
        else:  # one that serves, and one that serves after the first is killed
            for number in range(2):
                file = self._folder / f"lighthouse.{number}"
                words = address, str(LEAST), f"{plan.heartbeat_timeout_s:g}"
                self._serve(file.name, "-m", "benchmarks.chaos.lighthouse", str(file), *words)
            (self._folder / "lighthouse.0").touch()

    def _serve(self, name: str, *words: str) -> None:
        env, log = {"OMP_NUM_THREADS": "1", "RUST_LOG": "warn"}, self._log(f"{name}.log")
        command = ["env", *_UNSET, sys.executable, *words]
        self._servers.append(self._lab.start(SERVICES, command, env, log))

    def _wait_for_training(self) -> None:
        """Wait until all replicas have taken a step; the run begins then."""
        end_s = time.time() + START_LIMIT_S
        while True:
            logs = read_logs(self._folder)
            firsts = [[row.at_s for one in logs[r] for row in one.rows[1:2]] for r in logs]
            if all(firsts):
                self._begun_s = max(map(min, firsts))
                return
            ended = any(one.poll() is not None for one in self._started)
            if ended or time.time() > end_s:
                raise RuntimeError(
                    f"The replicas of {self._plan.method} did not train within {START_LIMIT_S:g} s."
                    f" Their output is in {self._folder}."
                )
            time.sleep(_POLL_S)

    @property
    def _started(self) -> list[subprocess.Popen[bytes]]:
        return [*self._replicas.values(), *self._servers, *self._torchruns]

    @staticmethod
    def _python(module: str, *words: str) -> list[str]:
        return [sys.executable, "-m", f"benchmarks.chaos.{module}", *words]

    def _log(self, name: str) -> IO[bytes]:
        return self._files.enter_context((self._folder / name).open("ab"))

    # -- disturbances

    def _at(self, seconds: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._due, (seconds, next(self._numbers), act))

    def _disturb(self, event: Event) -> None:
        now_s = time.time() - self._begun_s
        over_s = now_s + event.lasts_s
        if event.kind == MEETING:
            if self._plan.method in RESTARTED:
                self._note("there is no meeting point")
                return
            self._at(over_s, self._take_meeting_away())
        else:
            replica = event.replica
            pid = read_pid(self._folder, replica)
            if pid is None:
                self._note(f"{event} does not happen: there is no process")
                return
            if event.kind == CUT:
                self._lab.plug(replica, False)
                self._at(over_s, lambda: self._lab.plug(replica, True))
            elif event.kind == STOP:
                self._signal(pid, replica, signal.SIGSTOP)
                self._at(over_s, lambda: self._signal(pid, replica, signal.SIGCONT))
            elif event.kind == TERM:
                self._signal(pid, replica, signal.SIGTERM)
                self._at(now_s + TERM_S, lambda: self._signal(pid, replica, signal.SIGKILL))
            else:
                if event.kind == SLOW:
                    (self._folder / f"{replica}.delay").write_text(str(event.lasts_s))
                self._signal(pid, replica, signal.SIGKILL)
        self._events.append(event._replace(at_s=now_s))
        self._note(str(event))

    def _take_meeting_away(self) -> Callable[[], object]:
        """Make the meeting point unreachable; return what brings it back."""
        if self._plan.method == FOLDER:
            store, away = self._folder / "store", self._folder / "store.away"
            store.rename(away)
            return partial(away.rename, store)
        server = self._servers[0]
        if self._plan.method in (TCP, S3):
            server.send_signal(signal.SIGSTOP)
            return partial(server.send_signal, signal.SIGCONT)
        server.kill()
        return (self._folder / "lighthouse.1").touch

    def _signal(self, pid: int, replica: int, signum: signal.Signals) -> None:
        """Send a signal to a process that is still the replica's."""
        if read_pid(self._folder, replica) == pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _note(self, text: str) -> None:
        line = f"{time.time() - self._begun_s:7.1f} s  {text}"
        self._timeline.append(line)
        print(line, flush=True)
