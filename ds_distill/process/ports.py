"""Ports at which processes meet; here and not in `world`, so that a launcher need not import
deepspeed."""

from __future__ import annotations

import socket

PORTS = range(20000, 30000)
"""Ports for ranks to meet at: below those that Linux gives to outgoing connections."""


def free_port() -> int:
    """A TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def why_unusable(port: int) -> str | None:
    """Why nothing can listen at a TCP port of this machine, in the system's words; None where it
    can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
