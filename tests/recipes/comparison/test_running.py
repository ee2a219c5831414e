"""Jobs that fail, hang, are interrupted or are done already, played by small scripts."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.lab import LaboratoryUnavailable, why_unavailable
from recipes.comparison.jobs import Job, Plan
from recipes.comparison.running import (
    RECORD_FILE,
    TIMED_OUT,
    check_laboratory,
    failure_text,
    run,
    run_all,
)

COUNTS = "from pathlib import Path; f = Path('{}'); f.write_text(f.read_text() + 'x')"
# a rank that outlives its parent, and a parent that waits for ever
HANGS = "import subprocess as s, sys, time; p = s.Popen(['sleep', '60']); print(p.pid, flush=True)"


@dataclass(frozen=True)
class Script(Job):
    """A job that runs a line of Python in place of the recipe."""

    code: str = ""

    @property
    def arguments(self) -> list[str]:
        return ["-c", self.code]


def script(name: str, folder: Path, code: str) -> Script:
    return Script(name, (), folder / name, (), 1, code=code)


def plan(folder: Path, timeout_s: float | None = 60.0) -> Plan:
    return Plan(("a", "b"), None, 2, timeout_s, {}, folder)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def assert_gone(pid: int) -> None:
    """It has ended, at most waits to be reaped; a killed process takes a moment."""
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} lives on")


def test_a_job_that_fails_is_named_with_its_last_lines_and_the_others_run(tmp_path: Path) -> None:
    code = "import sys; print(*range(99), sep='\\n', flush=True); sys.exit('no such corpus')"
    jobs = [script("a", tmp_path, code), script("b", tmp_path, "print('fine')")]
    console = quiet()
    bad, good = run_all(jobs, plan(tmp_path), console)
    assert (bad.returncode, good.returncode) == (1, 0)
    text = failure_text(bad)
    assert text.splitlines()[-2:] == ["98", "no such corpus"]
    assert "84" not in text.splitlines(), "only the last lines"
    assert f"ended with exit code 1. All that it printed: {tmp_path}/a/output.log" in text
    assert text in printed(console)
    assert re.search(r"\[1/2\] a: FAILED, \d+ s\n", printed(console))
    assert re.search(r"\[2/2\] b: done, \d+ s\n", printed(console))


def test_finished_jobs_are_kept_and_failed_ones_run_again(tmp_path: Path) -> None:
    tally = tmp_path / "tally"
    tally.write_text("")
    done = script("a", tmp_path, COUNTS.format(tally))
    fails = script("b", tmp_path, COUNTS.format(tally) + "; raise SystemExit(1)")
    first = run_all([done, fails], plan(tmp_path), quiet())
    assert tally.read_text() == "xx"
    (fails.folder / "half-written").touch()
    console = quiet()
    second = run_all([done, fails], plan(tmp_path), console)
    assert tally.read_text() == "xxx"
    assert second[0] == first[0]
    assert "a: kept, it is done already" in printed(console)
    assert not (fails.folder / "half-written").exists(), "a job begins in an empty folder"


def test_a_folder_of_another_command_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = script("b", tmp_path, "pass")
    run(done, plan(tmp_path))
    fresh = script("a", tmp_path, "pass")
    with pytest.raises(ValueError, match=r"contains a job of another command: `python -c pass`"):
        run_all([fresh, replace(done, code="print()")], plan(tmp_path), quiet())
    in_laboratory = replace(plan(tmp_path), bandwidth="100mbit")
    with pytest.raises(ValueError, match=r"This one is .* at 100mbit on 2 nodes"):
        run_all([done], in_laboratory, quiet())
    assert not fresh.folder.exists()


def test_a_folder_that_is_no_jobs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "precious").touch()
    with pytest.raises(ValueError, match=r"exists but is not a job of a comparison"):
        run_all([script("a", tmp_path, "pass")], plan(tmp_path), quiet())
    assert (tmp_path / "a" / "precious").exists()


def test_a_job_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    job = script("a", tmp_path, HANGS + "; time.sleep(60)")
    record = run(job, plan(tmp_path, timeout_s=3.0))
    assert record.returncode == TIMED_OUT
    assert "It took too long and was ended" in failure_text(record)
    [pid] = (job.folder / "output.log").read_text().split()
    assert_gone(int(pid))


def test_ctrl_c_ends_the_job_and_it_runs_again_next_time(tmp_path: Path) -> None:
    def press(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    job = script("a", tmp_path, HANGS + "; time.sleep(60)")
    said, over = job.folder / "output.log", threading.Event()

    def press_when_it_runs() -> None:
        while not (said.exists() and said.read_text().endswith("\n")) and not over.wait(0.05):
            pass
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGALRM)

    thread = threading.Thread(target=press_when_it_runs)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all([job], plan(tmp_path), quiet())
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGALRM, before)
    [pid] = (job.folder / "output.log").read_text().split()
    assert_gone(int(pid))
    assert json.loads((job.folder / RECORD_FILE).read_text())["returncode"] is None
    console = quiet()
    run_all([job], plan(tmp_path, timeout_s=0.1), console)
    assert "[1/1] a: FAILED" in printed(console)


def test_without_a_laboratory_it_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = replace(plan(tmp_path), bandwidth="100mbit")
    monkeypatch.setattr("recipes.comparison.running.why_unavailable", lambda: "It needs root.")
    with pytest.raises(LaboratoryUnavailable, match="It needs root."):
        check_laboratory(asked)
    check_laboratory(plan(tmp_path))  # asks for none
    with pytest.raises(ValueError, match="`rate='fast'` is not a positive rate"):
        check_laboratory(replace(asked, bandwidth="fast"))


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_in_the_laboratory_every_node_runs_it_and_interfaces_are_counted(tmp_path: Path) -> None:
    code = (
        "import os, socket, sys; rank = int(os.environ['RANK']); print('rank', rank, flush=True)\n"
        "address = (os.environ['MASTER_ADDR'], 7777)\n"
        "if rank == 0:\n"
        "    server = socket.create_server(address); peer, _ = server.accept()\n"
        "    while peer.recv(65536): pass\n"
        "else:\n"
        "    import time\n"
        "    for _ in range(500):\n"
        "        try: peer = socket.create_connection(address); break\n"
        "        except ConnectionRefusedError: time.sleep(0.02)\n"
        "    peer.sendall(bytes(100000))\n"
        "    sys.exit(4)\n"
    )
    asked = replace(plan(tmp_path, timeout_s=20.0), bandwidth="100mbit")
    record = run(script("a", tmp_path, code), asked)
    assert record.returncode == 4
    assert record.interface_bytes is not None
    acknowledgements, data = record.interface_bytes
    assert acknowledgements < 50_000 < 100_000 < data < 200_000  # a busy machine also resends
    assert [Path(log).read_text() for log in record.logs] == ["rank 0\n", "rank 1\n"]
    assert os.path.basename(record.logs[1]) == "output-node1.log"
