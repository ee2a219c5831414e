"""Which network interface is chosen, by what the kernel and the hosts file say (played here)."""

from __future__ import annotations

import os
import re
import socket

import pytest

from lightning_commfree.comm import sockets
from lightning_commfree.comm.sockets import VARIABLE, GlooInterface, choose_interface

LAN = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "eth1": "192.168.7.5", "down0": None}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on two networks, as Debian leaves its name."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(LAN)))
    monkeypatch.setattr(sockets, "interface_address", LAN.get)
    monkeypatch.setattr(sockets, "host_addresses", lambda: ["127.0.1.1"])
    return monkeypatch


def towards(host: pytest.MonkeyPatch, address: str | None) -> None:
    host.setattr(sockets, "_local_address_for", lambda _: address)


def test_the_way_to_the_main_node_counts(host: pytest.MonkeyPatch) -> None:
    towards(host, "192.168.7.5")
    assert choose_interface("main") == "eth1"
    host.setattr(sockets, "host_addresses", lambda: ["10.0.0.5"])
    assert choose_interface("main") == "eth1"


@pytest.mark.parametrize("address", ["127.0.0.1", None, "10.9.9.9"])
def test_where_it_leads_nowhere_gloos_own_choice_or_the_only_one(
    address: str | None, host: pytest.MonkeyPatch
) -> None:
    towards(host, address)
    text = "Its interfaces are: eth0, eth1. On every host, set GLOO_SOCKET_IFNAME to"
    with pytest.raises(ValueError, match=re.escape(text)):
        choose_interface("main")
    host.setattr(sockets, "interface_address", {**LAN, "eth1": None}.get)
    assert choose_interface("main") == "eth0"
    host.setattr(sockets, "host_addresses", lambda: ["fe80::1", "10.0.0.5"])
    assert choose_interface("main") is None


def test_the_environment_is_as_it_was_and_the_users_word_stands(host: pytest.MonkeyPatch) -> None:
    towards(host, "10.0.0.5")
    told = GlooInterface()
    for before in (None, ""):
        if before is not None:
            host.setenv(VARIABLE, before)
        told.select("main")
        assert os.environ[VARIABLE] == "eth0"
        told.restore()
        told.restore()
        assert os.environ.get(VARIABLE) == before
    host.setenv(VARIABLE, "eth1")
    told.select("main")
    told.restore()
    assert os.environ[VARIABLE] == "eth1"


def test_this_very_machine() -> None:
    assert sockets.interface_address("lo") == "127.0.0.1"
    assert sockets.interface_address("absent0") is None
    assert sockets._local_address_for("127.0.0.1") == "127.0.0.1"
    assert sockets._local_address_for("no-such-host.invalid") is None
