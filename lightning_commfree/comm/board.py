"""Read a lighthouse's status page, which lists members and heartbeats, without joining the job.

torchft's lighthouse answers `GET /status` with a fragment of HTML. Reading it affects nobody,
whereas a quorum request makes the caller a member that the others wait for.
"""

from __future__ import annotations

import html
import http.client
import re
from typing import NamedTuple
from urllib.parse import urlsplit

_MAX_BYTES = 1 << 20  # enough for about 2,000 replicas
_MEMBER = re.compile(r"<b>(.*?)</b>.*?Step: (-?\d+).*?Manager: (.*?) <br", re.DOTALL)
_HEARTBEAT = re.compile(r'<li class="heartbeat\s*(old)?\s*">\s*(.*?): seen ([\d.eE+-]+)s ago')
_NUMBER = re.compile(r"Current quorum_id: (\d+)")
_REASON = re.compile(r"Next quorum status: (.*)")


class BoardMember(NamedTuple):
    """A member of the last quorum."""

    replica_id: str
    step: int  # its step when it asked for the quorum
    address: str  # URL of its state server


class Board(NamedTuple):
    """A lighthouse's status."""

    quorum_id: int  # starts at 0 again when a lighthouse restarts
    reason: str  # why the next quorum is or is not complete
    members: tuple[BoardMember, ...]
    heartbeats: dict[str, float]  # seconds since the last one, by replica id
    silent: frozenset[str]  # replicas whose last heartbeat is older than the lighthouse's timeout


def read_board(url: str, timeout_s: float = 5.0) -> Board:
    """Read a lighthouse's status page.

    Raises:
        ConnectionError: no lighthouse answers at `url`.
    """
    page = get_text(url, "/status", timeout_s)
    number = _NUMBER.search(page)
    if number is None:
        raise ConnectionError(
            f"A server answers at {url}, but it is not a torchft 0.2 lighthouse. Check the port."
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
    """Return the text at a server's path, truncated to 1 MB.

    Raises:
        ConnectionError: the server does not answer.
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
            f"No server answers at {url} ({error}). Check that one is running there, that the"
            " address and port are right, and that no firewall blocks the connection."
        ) from error
