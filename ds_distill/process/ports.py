"""Ports and addresses at which processes meet; here and not in `world`, so that a launcher need not
import deepspeed."""

from __future__ import annotations

import socket
from ipaddress import ip_address

PORTS = range(20000, 30000)
"""Ports for ranks to meet at: below those that Linux gives to outgoing connections."""


def free_port() -> int:
    """A TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def address_towards(host: str) -> str | None:
    """This machine's address by which it reaches another one; None if unknown, or its own alone."""
    try:
        kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if ip_address(own).is_loopback else own


def interface_towards(host: str) -> str | None:
    """The network interface of `address_towards`. Gloo would take that of this machine's name,
    which on many is the loopback's."""
    import psutil

    own, names = address_towards(host), psutil.net_if_addrs().items()
    return next((name for name, found in names if own in [one.address for one in found]), None)
