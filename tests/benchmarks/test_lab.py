"""The network laboratory: bytes and rates of its links, jobs, and cleanup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lab import NetLab, interface_counters, netlab
from benchmarks.lab.__main__ import main as command_main
from benchmarks.lab.nodes import parse_counters

UNAVAILABLE = netlab.why_unavailable()
needs_networks = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
PAYLOAD = 3_000_000
PROBE = [sys.executable, "-m", "benchmarks.grid.probe"]
TRANSFER = f"""
import os, socket, time
if os.environ["RANK"] == "1":
    with socket.create_server(("", 5000)) as server, server.accept()[0] as peer:
        while peer.recv(1 << 16): pass
else:
    for _ in range(200):
        try:
            peer = socket.create_connection(("node1", 5000)); break
        except ConnectionRefusedError: time.sleep(0.02)
    start = time.monotonic()
    peer.sendall(bytes({PAYLOAD})); peer.shutdown(socket.SHUT_WR); peer.recv(1)
    print(time.monotonic() - start)
"""


def namespaces(pid: int | None = None) -> list[str]:
    """The namespaces created by a process (None: this one)."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [
        name for name in listed.stdout.split() if name.startswith(f"netlab-{pid or os.getpid()}-")
    ]


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    with NetLab(nodes=2, rate="100mbit") as laboratory:
        yield laboratory


@needs_networks
def test_the_interface_counts_a_known_transfer_and_the_rate_is_kept(lab: NetLab) -> None:
    """The bucket of 256 kB at each end passes immediately; the rest cannot exceed the rate."""
    try:
        for rate, bits in (("100mbit", 100e6), ("40mbit", 40e6)):
            lab.set_rate(rate)
            sender, receiver = lab.run([[sys.executable, "-c", TRANSFER]] * 2, timeout_s=30)
            assert (sender.returncode, receiver.returncode) == (0, 0), sender.output
            # 66 bytes of headers per packet of at least 1448; a busy machine also resends
            assert PAYLOAD < sender.sent_bytes < 1.5 * PAYLOAD
            assert receiver.sent_bytes < 0.05 * PAYLOAD, "only acknowledgements return"
            assert float(sender.output) > 8 * (PAYLOAD - 2 * 256 * 1024) / bits
    finally:
        lab.set_rate("100mbit")


@needs_networks
def test_a_wide_area_delays_and_loses_what_it_says() -> None:
    """A datagram there and back: 40 ms, and 10 % are lost on each way. TCP arrives all the same."""
    with NetLab(nodes=2, rate="100mbit", round_trip_s=0.04, loss=0.1, congestion="reno") as wide:
        echo, _ = wide.run([[*PROBE, "echo", "300"]] * 2, timeout_s=60)
        assert echo.returncode == 0, echo.output
        found = json.loads(echo.output)
        assert 40 <= found["median_ms"] < 60
        assert 0.1 < found["lost"] < 0.3
        both = wide.run([[*PROBE, "exchange", "30000"]] * 2, timeout_s=60)
        assert [result.returncode for result in both] == [0, 0], both[0].output
        control = ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
        assert wide.run([control, ["true"]], timeout_s=20)[0].output == "reno\n"


@needs_networks
def test_a_fresh_node_knows_only_itself_and_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    script = "echo $(hostname) $(getent hosts node1 || echo none) rank=$RANK"
    with NetLab(nodes=2, rate=None, fresh=True) as lab:
        first, second = lab.run([["sh", "-c", script]] * 2, timeout_s=20)
    assert first.output.split() == ["node0", "none", "rank="]
    assert second.output.split() == ["node1", "127.0.1.1", "node1", "rank="]


@needs_networks
def test_an_unplugged_node_is_cut_off_until_it_is_plugged_in_again(lab: NetLab) -> None:
    listen = "import socket; s = socket.create_server(('', 5002)); s.settimeout(4); s.accept()"
    call = """if True:
        import socket, time
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            try:
                print(socket.create_connection(("node1", 5002), 1).fileno() > 0); break
            except OSError: time.sleep(0.05)
    """
    commands = [[sys.executable, "-c", script] for script in (call, listen)]
    for connected, printed in ((False, ""), (True, "True\n")):
        lab.plug(1, connected)
        assert lab.run(commands, timeout_s=20)[0].output == printed


@needs_networks
def test_a_job_that_hangs_is_killed_with_its_children(lab: NetLab) -> None:
    start = time.monotonic()
    # the child leaves the session, so a signal to the process group does not reach it
    hangs = ["sh", "-c", "setsid sleep 77 & echo started; wait"]
    results = lab.run([hangs, ["true"]], timeout_s=3)
    assert time.monotonic() - start < 20
    assert [result.returncode for result in results] == [-9, 0]
    assert results[0].output == "started\n"
    pids = subprocess.run(
        ["ip", "netns", "pids", lab._namespace(0)], capture_output=True, text=True, check=True
    )
    assert pids.stdout == ""


@needs_networks
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_and_two_laboratories_do_not_collide(
    lab: NetLab, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(namespaces())
    assert len(before) == 3, "two nodes and the switch of the other laboratory"

    def interrupt(jobs: object, timeout_s: float) -> None:
        raise error

    monkeypatch.setattr(netlab, "wait_for", interrupt)
    other = NetLab(nodes=1, rate=None)

    def run_in_the_other() -> None:
        with other:
            assert len(namespaces()) == 5
            other.run([["sleep", "60"]], timeout_s=60)

    with pytest.raises(error):
        run_in_the_other()
    assert set(namespaces()) == before


@needs_networks
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_command_cleans_up_after_a_signal(signum: signal.Signals, tmp_path: Path) -> None:
    # the jobs report that they run, because a node runs other commands first
    job = ["sh", "-c", f'touch "{tmp_path}/$RANK" && exec sleep 60']
    command = [sys.executable, "-m", "benchmarks.lab", "--", *job]
    # a shell or `nohup` may ignore the signal for background jobs such as these tests
    handler = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
    unignored = {"preexec_fn": lambda: signal.signal(signum, handler)}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **unignored)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(list(tmp_path.iterdir())) == 2, "both jobs run"
        process.send_signal(signum)
        assert process.wait(timeout=20) != 0
    finally:
        process.kill()
    assert namespaces(process.pid) == []


@pytest.mark.parametrize("rate", ["fast", "0mbit", "100"])
def test_invalid_rates_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="is not a positive rate such as '100mbit'"):
        NetLab(rate=rate)


def test_without_root_it_says_so_and_exits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as stopped:
        command_main(["--", "true"])
    assert stopped.value.code == 2
    assert "needs root to create network namespaces" in capsys.readouterr().err


def test_counters_come_from_the_right_columns_and_an_unknown_interface_is_refused() -> None:
    table = "Inter-| Receive\n face |bytes\n  eth0:7 1 0 0 0 0 0 0 9 2 0 0 0 0 0 0\n"
    assert parse_counters(table, "eth0") == (9, 7)
    with pytest.raises(ValueError, match="There is no interface `eth9`, only"):
        interface_counters("eth9")
