"""Where the daemon listens: the default address and the forms that an address may have."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from kvstore.errors import InvalidRequest

__all__ = ["Address", "default_address", "machine_id", "parse_address", "runtime_directory"]

_HOST_PORT: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """One address: a Unix socket's path, or a TCP host and port.

    Attributes:
        path: absolute path of the socket; empty for TCP.
        host: name or IP address (IPv6 without brackets); empty for a Unix socket.
        port: TCP port, 0 … 65535.
    """

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def local(self) -> bool:
        """Whether it is a Unix socket."""
        return bool(self.path)

    @property
    def target(self) -> str:
        """What gRPC is given; it decodes %-escapes in paths, so they are escaped."""
        if self.path:
            return f"unix://{quote(self.path)}"
        return str(self)

    def __str__(self) -> str:
        """Return the address as people write it."""
        if self.path:
            return f"unix://{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse ``unix:///path``, ``unix:path``, ``host:port`` or ``[ipv6]:port``.

    Raises:
        InvalidRequest: it is none of these.
    """
    if text.startswith("unix:"):
        rest = text.removeprefix("unix:")
        path = rest.removeprefix("//") if rest.startswith("///") else rest
        if not path or path.startswith("//") or "\0" in path:
            raise InvalidRequest("address", f"{text!r} names no socket path")
        return Address(path=os.path.abspath(path))  # noqa: PTH100 - Path.resolve follows links
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise InvalidRequest("address", f"{text!r} is neither unix:///path nor host:port")
    return Address(host=match["host"].strip("[]"), port=int(match["port"]))


def runtime_directory() -> Path:
    """Return the directory for sockets of this user, the same for daemon and clients."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_absolute():
        return Path(runtime) / "kvstore"
    return Path(f"/tmp/kvstore-{os.getuid()}")


def default_address() -> Address:
    """Return ``$KVSTORE_ADDRESS``, else the socket in this user's runtime directory.

    Raises:
        InvalidRequest: the variable is set and no address.
    """
    text = os.environ.get("KVSTORE_ADDRESS", "")
    return parse_address(text) if text else Address(path=str(runtime_directory() / "kvstore.sock"))


def machine_id() -> str:
    """Return an id that processes share when, and only when, they run under one kernel boot.

    Containers of one machine share it; whether they also share the pool's directory shows when
    its control file is opened.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
