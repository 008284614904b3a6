"""Agents on other hosts through OpenSSH."""

from __future__ import annotations

import shlex
import sys

SIGN_OF_LIFE_SECONDS = 5.0
SILENCE_SECONDS = 60.0
"""After so long without a sign of life an agent takes the connection for lost."""

OPTIONS = [
    *("-T", "-o", "BatchMode=yes"),  # a question would wait for ever
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),  # a lost link ends ssh
    *("-o", "ForwardAgent=no", "-o", "ForwardX11=no", "-o", "ClearAllForwardings=yes"),
]

FAILED = 255
"""The exit code of ssh itself; every other one is that of the command."""


def ssh_command(host: str, module: str, port: int | None) -> list[str]:
    """Run a module on a host, with the Python of this process, which is at the same path there.

    The remote shell gets one fixed, quoted command. All else goes through the standard input.
    """
    command = f"exec {shlex.quote(sys.executable)} -P -m {module}"
    return ["ssh", *OPTIONS, *(["-p", str(port)] if port else []), "--", host, command]
