"""The processes of one run of the demo, and its timeline."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from benchmarks.elastic_demo.replica import Plan, Row, fit, read_rows

FOUNDERS = ("a", "b", "c")
_START_LIMIT_S = 120.0  # until all founders have built their model
_FIT_LIMIT_S = 240.0
_END_S = 5.0
_POLL_S = 0.1


class Act(NamedTuple):
    """What the script does to a replica when replica "a" has reached a step."""

    step: int
    kind: str  # "SIGKILL", "SIGTERM" or "start"
    name: str


class Event(NamedTuple):
    """A line of the timeline."""

    at_s: float  # since all founders began
    text: str
    members: int
    step: int  # of replica "a"

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.text:<34}{self.members} members  step {self.step}"


class Outcome(NamedTuple):
    """What a run leaves."""

    begun_s: float
    timeline: list[Event]
    logs: dict[str, list[Row]]  # by replica
    exits: dict[str, int | None]  # exit code; None: ended by the script, after its time
    finished: dict[str, dict[str, Any]]  # step and hash of each replica that reached the end


def run(plan: Plan, acts: Sequence[Act]) -> Outcome:
    """Run the replicas to their end, print the timeline, and end every process.

    Args:
        plan: of the run; the folder must be empty. Its store becomes a folder in it.
        acts: in the order of their steps.
    """
    store = plan.folder / "store"
    store.mkdir()
    job = _Job(plan._replace(strategy={**plan.strategy, "store": store.as_uri()}))
    try:
        return job.play(list(acts))
    finally:
        job.end()


class _Job:
    def __init__(self, plan: Plan) -> None:
        # a server that has imported everything forks the replicas, with no thread of this process
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.elastic_demo.replica"])
        self._plan = plan
        self._processes: dict[str, BaseProcess] = {}
        self._timeline: list[Event] = []
        self._begun_s = time.monotonic()
        self._last = Row(0.0, 0, 0.0, 0)

    def play(self, acts: list[Act]) -> Outcome:
        for name in FOUNDERS:
            self._start(name)
        self._wait_ready()
        self._begun_s = time.monotonic()
        (self._plan.folder / "go").touch()
        self._note(f"{', '.join(FOUNDERS)} begin")

        alive, joined = set(FOUNDERS), set(FOUNDERS)
        while alive and time.monotonic() < self._begun_s + _FIT_LIMIT_S:
            time.sleep(_POLL_S)
            members = self._last.members
            self._last = (read_rows(self._log("a")) or [self._last])[-1]
            if self._last.members != members:
                self._note(f"exchanges have {self._last.members} members")
            for name in [n for n in self._processes if n not in joined and self._log(n).exists()]:
                if rows := read_rows(self._log(name)):
                    joined.add(name)
                    self._note(f"{name} has joined after step {rows[0].step - 1}")
            for name in [n for n in alive if not self._processes[n].is_alive()]:
                alive.remove(name)
                self._note(f"{name} exits with code {self._processes[name].exitcode}")
            while acts and acts[0].step <= self._last.step:
                alive |= self._do(acts.pop(0))
            if not acts and alive <= joined:
                (self._plan.folder / "joined").touch()
        for act in acts:
            self._note(f"too late for {act.kind} {act.name}")
        codes = {n: None if n in alive else p.exitcode for n, p in self._processes.items()}
        results = {n: self._plan.folder / f"{n}.json" for n in self._processes}
        return Outcome(
            self._begun_s,
            self._timeline,
            {n: read_rows(self._log(n)) for n in self._processes},
            codes,
            {n: json.loads(path.read_text()) for n, path in results.items() if path.exists()},
        )

    def end(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
            process.join(_END_S)

    def _do(self, act: Act) -> set[str]:
        """Act; return the replicas that this starts."""
        if act.kind == "start":
            self._note(f"start {act.name}")
            self._start(act.name)
            return {act.name}
        self._note(f"{act.kind} to {act.name}")
        process = self._processes[act.name]
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.Signals[act.kind])
        return set()

    def _start(self, name: str) -> None:
        process = self._context.Process(target=fit, args=(name, self._plan), daemon=True)
        process.start()
        self._processes[name] = process

    def _wait_ready(self) -> None:
        end_s = time.monotonic() + _START_LIMIT_S
        while not all((self._plan.folder / f"{name}.ready").exists() for name in FOUNDERS):
            if time.monotonic() > end_s or not all(p.is_alive() for p in self._processes.values()):
                raise RuntimeError(
                    "A replica failed before the fit, or took longer than"
                    f" {_START_LIMIT_S:g} s to build its model. Its error is above."
                )
            time.sleep(_POLL_S)

    def _log(self, name: str) -> Any:
        return self._plan.folder / f"{name}.jsonl"

    def _note(self, text: str) -> None:
        now_s = time.monotonic() - self._begun_s
        self._timeline.append(Event(now_s, text, self._last.members, self._last.step))
        print(self._timeline[-1], flush=True)
