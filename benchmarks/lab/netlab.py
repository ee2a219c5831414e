"""Nodes on a switch, their links, and the jobs that run in them.

A node is a Linux network namespace with its own host name, one interface, `eth0`, and no other
connection. All nodes are connected to one switch (a bridge in another namespace). Both ends of
every cable have a token bucket, so that a node sends and receives at the full rate simultaneously,
like full-duplex Ethernet. Only the rate is shaped, not the delay. After a pause the bucket is full
and passes 256 KiB unshaped.

With a round trip or loss, there is no switch: a process relays the packets (`wan`), and only what a
node sends is shaped.

Nothing is left on the host: namespaces are removed on exit, and host names are bind-mounted for the
job only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from typing_extensions import Self

from benchmarks.lab import wan
from benchmarks.lab.nodes import (
    INTERFACE,
    Counters,
    LaboratoryUnavailable,
    command_output,
    kill_all_in,
    parse_counters,
    reaped,
    remove_namespace,
    try_command,
    wait_for,
)

SUBNET = "10.77.0"  # visible inside the laboratory only
MAX_NODES = 200
BURST_KIB = 256  # passes unshaped after a pause: 21 ms at 100 Mbit/s
PORT = 29500  # free in every new namespace
_RATE = re.compile(r"\d+(\.\d+)?[kmg]?bit")
# Runs before the job in its node: sets its host name, and a hosts file that only it sees.
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


@dataclass(frozen=True)
class JobResult:
    """Result of one job of `NetLab.run`.

    Attributes:
        returncode: of the process; if negative, the signal that ended it.
        output: stdout and stderr together.
        sent_bytes: bytes sent by the node's interface while the jobs ran.
    """

    returncode: int
    output: str
    sent_bytes: int


def why_unavailable() -> str | None:
    """Return why this machine cannot run the laboratory; None if it can."""
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if not shutil.which(tool)]
    if missing:
        return (
            f"The network laboratory needs {', '.join(f'`{tool}`' for tool in missing)} (Linux"
            " with iproute2 and util-linux)."
        )
    if os.geteuid() != 0:
        return "The network laboratory needs root to create network namespaces; run it with sudo."
    probe = ["unshare", "--net", "--mount", "--uts", "true"]
    result = subprocess.run(probe, capture_output=True, text=True, check=False)
    if result.returncode:
        return f"This machine does not allow network namespaces: {result.stderr.strip()}."
    return None


class NetLab:
    """Context manager for nodes on a switch; always torn down on exit.

    Args:
        nodes: number of nodes.
        rate: of every link in each direction, in the format of `tc` ("100mbit"); None: unshaped.
        fresh: whether a node is like a newly installed Debian or Ubuntu: /etc/hosts has only its
            own name, for 127.0.1.1, and jobs get no variables. Otherwise every node can resolve all
            names, and jobs get `environment`.
        round_trip_s: between two nodes.
        loss: probability with which a packet is lost.
        congestion: TCP's congestion control, such as "cubic", one of this machine's
            net.ipv4.tcp_allowed_congestion_control; None: the machine's default.

    Raises:
        ValueError: `nodes` or `rate` is invalid.
        LaboratoryUnavailable: on entering, if this machine cannot run the laboratory.

    Example::

        with NetLab(nodes=2, rate="100mbit") as lab:
            results = lab.run([["python", "train.py"]] * 2, timeout_s=60)
    """

    def __init__(
        self,
        nodes: int = 2,
        rate: str | None = "100mbit",
        fresh: bool = False,
        round_trip_s: float = 0.0,
        loss: float = 0.0,
        congestion: str | None = None,
    ) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"`nodes={nodes}` must be between 1 and {MAX_NODES}.")
        _check_rate(rate)
        self.rate = rate
        self._nodes, self._fresh = nodes, fresh
        self._round_trip_s, self._loss, self._congestion = round_trip_s, loss, congestion
        # the suffix keeps several laboratories of one process apart
        self._prefix = f"netlab-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._cleanup = ExitStack()
        self._folder = Path()

    @property
    def names(self) -> list[str]:
        """Host names of the nodes."""
        return [f"node{i}" for i in range(self._nodes)]

    def address(self, node: int) -> str:
        """Return the IPv4 address of a node."""
        return f"{SUBNET}.{node + 1}"

    def __enter__(self) -> Self:
        reason = why_unavailable()
        if reason:
            raise LaboratoryUnavailable(reason)
        with ExitStack() as stack:  # undoes the finished steps if a later one fails
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="netlab-"))
            self._folder = Path(folder)
            rows = [f"{self.address(i)} {name}" for i, name in enumerate(self.names)]
            for node, name in enumerate(self.names):
                known = [f"127.0.1.1 {name}"] if self._fresh else rows
                self._hosts(node).write_text("\n".join(["127.0.0.1 localhost", *known]) + "\n")
            spaces = [self._namespace(i) for i in range(self._nodes)]
            for namespace in (self._switch, *spaces):
                # register the removal first, as an interrupt may come in between
                stack.callback(remove_namespace, namespace)
                command_output("ip", "netns", "add", namespace)
            if self._is_wide:
                stack.enter_context(wan.relay(spaces, self._round_trip_s, self._loss))
            else:
                self._build_switch()
            for node in range(self._nodes):
                self._configure(node)
            self.set_rate(self.rate)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    def set_rate(self, rate: str | None, nodes: Sequence[int] | None = None) -> None:
        """Change the rate of every link, or of some nodes' links; running jobs go on."""
        _check_rate(rate)
        if nodes is None:
            self.rate, nodes = rate, range(self._nodes)
        ends = [(self._namespace(i), INTERFACE) for i in nodes]
        if not self._is_wide:
            ends += [(self._switch, f"port{i}") for i in nodes]
        for namespace, device in ends:
            if rate is None:
                # fails if none was set, which is fine
                try_command("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
            else:
                shape = ["tbf", "rate", rate, "burst", f"{BURST_KIB}kb", "latency", "50ms"]
                command_output(
                    "tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape
                )

    def connect(self, connected: bool) -> None:
        """Let the switch forward all traffic or none; the nodes' own links stay up.

        With a round trip or loss there is no switch, and this fails.
        """
        state = "up" if connected else "down"
        command_output("ip", "-n", self._switch, "link", "set", "br0", state)

    def plug(self, node: int, connected: bool) -> None:
        """Connect a node's cable to the switch, or pull it out there; the node's link stays up."""
        to = ["master", "br0"] if connected else ["nomaster"]
        command_output("ip", "-n", self._switch, "link", "set", f"port{node}", *to)

    def counters(self, node: int) -> Counters:
        """Return the current counters of a node's interface."""
        command = ["ip", "netns", "exec", self._namespace(node), "cat", "/proc/self/net/dev"]
        return parse_counters(command_output(*command), INTERFACE)

    def environment(self, node: int) -> dict[str, str]:
        """Return torchrun's environment for one process per node, and gloo's interface."""
        return {
            "RANK": str(node),
            "GROUP_RANK": str(node),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self._nodes),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "TORCHELASTIC_RUN_ID": self._prefix,  # Lightning detects torchrun by this variable
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def run(
        self,
        commands: Sequence[Sequence[str]],
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> list[JobResult]:
        """Run `commands[i]` in node i, all at the same time, and wait for them.

        If one fails, the others have 5 seconds left to report the failure.

        Args:
            commands: one argv per node.
            timeout_s: for all jobs together; jobs still running then are killed (code -9).
            env: overrides this process's environment and the node's.

        Raises:
            ValueError: the number of commands is not the number of nodes.
        """
        if len(commands) != self._nodes:
            raise ValueError(
                f"Got {len(commands)} commands for {self._nodes} nodes; pass one per node."
            )
        nodes = range(self._nodes)
        before = [self.counters(node).sent_bytes for node in nodes]
        with ExitStack() as stack:
            # files, because a job blocks on a full pipe that nobody reads
            logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in nodes]
            jobs = []
            for node in nodes:
                stack.callback(kill_all_in, self._namespace(node))
                jobs.append(self.start(node, commands[node], env or {}, logs[node]))
                stack.enter_context(reaped(jobs[-1]))
            wait_for(jobs, timeout_s)
            for node in nodes:  # hanging jobs, and processes left behind by finished ones
                kill_all_in(self._namespace(node))
                jobs[node].wait()
            sent = [self.counters(node).sent_bytes - before[node] for node in nodes]
            return [
                JobResult(jobs[node].returncode, _read(logs[node]), sent[node]) for node in nodes
            ]

    def enter(self, node: int) -> list[str]:
        """Return the words that run a command in a node when put before it, in one process."""
        into = ["ip", "netns", "exec", self._namespace(node), "unshare", "--uts", "--mount"]
        return [*into, "sh", "-c", _ENTER, "sh", str(self._hosts(node)), self.names[node]]

    def start(
        self, node: int, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a command in a node; if it still runs when the laboratory exits, it is killed."""
        return subprocess.Popen(
            [*self.enter(node), *command],
            env={**os.environ, **({} if self._fresh else self.environment(node)), **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the jobs
        )

    def _hosts(self, node: int) -> Path:
        return self._folder / f"hosts{node}"

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-switch"

    def _namespace(self, node: int) -> str:
        return f"{self._prefix}-{node}"

    @property
    def _is_wide(self) -> bool:
        return bool(self._round_trip_s or self._loss)

    def _build_switch(self) -> None:
        command_output("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        command_output("ip", "-n", self._switch, "link", "set", "br0", "up")
        for node in range(self._nodes):
            space, port = self._namespace(node), f"port{node}"
            # both ends are created inside their namespaces, so the host never sees them
            cable = ["type", "veth", "peer", "name", INTERFACE, "netns", space]
            command_output("ip", "-n", self._switch, "link", "add", port, *cable)
            command_output("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")

    def _configure(self, node: int) -> None:
        space = self._namespace(node)
        if self._congestion is not None:
            setting = f"net.ipv4.tcp_congestion_control={self._congestion}"
            command_output("ip", "netns", "exec", space, "sysctl", "-qw", setting)
        command_output(
            "ip", "-n", space, "address", "add", f"{self.address(node)}/24", "dev", INTERFACE
        )
        for device in ("lo", INTERFACE):
            command_output("ip", "-n", space, "link", "set", device, "up")


def _check_rate(rate: str | None) -> None:
    if rate is not None and not (_RATE.fullmatch(rate) and float(rate.rstrip("kmgbit")) > 0):
        raise ValueError(
            f"`rate={rate!r}` is not a positive rate such as '100mbit', '1gbit' or '500kbit'."
        )


def _read(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")
