"""Read the members and heartbeats from a torchft lighthouse's status page.

The lighthouse responds to `GET /status` with an HTML fragment. Reading it has no side effects,
whereas a quorum request would make the caller a member of the job, and the other members would wait
for the caller.
"""

from __future__ import annotations

import html
import http.client
import re
from typing import NamedTuple
from urllib.parse import urlsplit

ABSENT_STEP = -1  # `BoardMember.step` of replicas that have died or left, but are still listed
_MAX_BYTES = 1 << 20  # enough for about 2,000 replicas
_MEMBER = re.compile(r"<b>(.*?)</b>.*?Step: (-?\d+).*?Manager: (.*?) <br", re.DOTALL)
_HEARTBEAT = re.compile(r'<li class="heartbeat\s*(old)?\s*">\s*(.*?): seen ([\d.eE+-]+)s ago')
_NUMBER = re.compile(r"Current quorum_id: (\d+)")
_REASON = re.compile(r"Next quorum status: (.*)")


class BoardMember(NamedTuple):
    """A member of a lighthouse's last quorum, as its status page lists it."""

    replica_id: str
    step: int  # the member's training step when it requested the quorum
    address: str  # URL of its state server


class Board(NamedTuple):
    """Contents of a torchft lighthouse's status page."""

    quorum_id: int  # resets to 0 when the lighthouse restarts
    reason: str  # why the next quorum is or is not complete
    members: tuple[BoardMember, ...]
    heartbeats: dict[str, float]  # seconds since each replica's last heartbeat, by replica id
    silent: frozenset[str]  # replicas whose last heartbeat is older than the lighthouse's timeout


def read_board(url: str, timeout_s: float = 5.0) -> Board:
    """Fetch and parse a torchft lighthouse's status page.

    Raises:
        ConnectionError: no torchft 0.2 lighthouse responds at `url`.
    """
    page = get_text(url, "/status", timeout_s)
    number = _NUMBER.search(page)
    if number is None:
        raise ConnectionError(
            f"The server at {url} is not a torchft 0.2 lighthouse. Check the port."
        )
    reason, heartbeats = _REASON.search(page), _HEARTBEAT.findall(page)
    return Board(
        int(number[1]),
        html.unescape(reason[1].strip()) if reason else "",
        tuple(
            BoardMember(html.unescape(name), int(step), html.unescape(address))
            for name, step, address in _MEMBER.findall(page)
        ),
        {html.unescape(name): float(age) for _, name, age in heartbeats},
        frozenset(html.unescape(name) for is_old, name, _ in heartbeats if is_old),
    )


def get_text(url: str, path: str, timeout_s: float) -> str:
    """Send an HTTP GET request and return the response body as text, truncated to 1 MiB.

    Raises:
        ConnectionError: no server responds at `url`.
    """
    address = urlsplit(url)
    try:
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=timeout_s
        )
        try:
            connection.request("GET", path)
            return connection.getresponse().read(_MAX_BYTES).decode(errors="replace")
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConnectionError(
            f"No server is responding at {url} ({error}). Check that one is running there, that the"
            " address and port are correct, and that no firewall is blocking the connection."
        ) from error
