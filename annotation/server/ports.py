"""Whether a port is free, and who has it where it is not."""

from __future__ import annotations

import errno
import ipaddress
import socket
from pathlib import Path

from rlhf.errors import BackendError, ConfigError

LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


def is_loopback(host: str) -> bool:
    """Only this machine reaches it: localhost, 127.*, ::1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:    # a name, wherever it leads
        return False


def claim(host: str, port: int) -> int:
    """The port, or with 0 a free one.

    Raises BackendError where another process has it, ConfigError where this machine cannot listen on the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)    # as the server does: connections that just ended do not count
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise BackendError(f"port {port} is taken by {holder(port)}. Stop it, or choose another port with --port.") from None
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}. --host is an address of this machine: 127.0.0.1 "
                              "for this machine alone, 0.0.0.0 for everybody; ports below 1024 need root.") from error
        return int(probe.getsockname()[1])


def holder(port: int) -> str:
    """The process that listens on a port, as far as Linux tells this user; elsewhere `another program`."""
    inodes = {row[9] for table in ("/proc/net/tcp", "/proc/net/tcp6") if Path(table).is_file()
              for row in map(str.split, Path(table).read_text(encoding="ascii").splitlines()[1:])
              if row[3] == LISTENING and int(row[1].rsplit(":", 1)[1], 16) == port}
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        if sockets & opened_by(process):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            return f"process {process.name} ({command})"
    return "another program"


def opened_by(process: Path) -> set[str]:
    """Where the descriptors of a process lead; nothing for one that is another user's, or has just ended."""
    try:
        return {target_of(file) for file in (process / "fd").iterdir()}
    except OSError:
        return set()


def target_of(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:    # closed since it was listed
        return ""
