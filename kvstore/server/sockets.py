"""Unix sockets that survive restarts: a file per boot behind a renamed symlink.

gRPC unlinks or takes over a socket path that somebody else still serves, and leaves its file
behind when killed. So each boot binds a fresh path, and the address that clients know is a
symlink that is renamed into place only when the boot serves. What dead boots left is removed
under the state directory's lock. Another state's daemon may serve the same address: as long as it
accepts connections there, the address is refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.address import Address

__all__ = ["BootSocket", "why_not"]

# sun_path without its final NUL.
_MAX_PATH_BYTES = 107


class BootSocket:
    """One listening Unix address of one boot."""

    def __init__(self, address: Address, boot_name: str) -> None:
        """Choose the per-boot path and make its directory.

        Raises:
            ConfigError: the directory cannot be made or is not ours, something else lies at the
                address, or somebody serves it.
        """
        self._link = Path(address.path)
        directory = self._link.parent
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = directory.stat()
        except OSError as error:
            raise ConfigError(f"listen: {directory}: {error.strerror}") from error
        # A shared directory is fine when nobody else may replace our names in it.
        if owner.st_uid not in (os.getuid(), 0) or (
            owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not owner.st_mode & stat.S_ISVTX
        ):
            raise ConfigError(f"listen: {directory} can be written by other users")
        self._check_link()
        self._check_nobody_serves()
        self._remove_dead()
        self.path = directory / f".{self._link.name}.{boot_name}"
        self._own_directory: Path | None = None
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            self._own_directory = Path(tempfile.mkdtemp(prefix="kvstore-", dir="/tmp"))
            self.path = self._own_directory / "s"

    def _check_link(self) -> None:
        try:
            mode = self._link.lstat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"listen: {self._link}: {error.strerror}") from error
        if not stat.S_ISLNK(mode) and not stat.S_ISSOCK(mode):
            raise ConfigError(f"listen: {self._link} exists and is not a socket")

    def _check_nobody_serves(self) -> None:
        """Refuse an address whose daemon lives, however busy or stopped it is."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            try:
                # Through a descriptor of the directory: the path may be too long for a socket.
                directory = os.open(self._link.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    probe.connect(f"/proc/self/fd/{directory}/{self._link.name}")
                finally:
                    os.close(directory)
            except BlockingIOError:
                pass  # its queue of connections is full: it is there
            except OSError:
                return
        raise ConfigError(f"listen: {self._link} is served by another daemon")

    def _remove_dead(self) -> None:
        """Remove the sockets of boots that are over; the caller holds the state's lock."""
        with contextlib.suppress(OSError):
            target = self._link.readlink()
            if target.is_absolute() and target.parent.name.startswith("kvstore-"):
                target.unlink(missing_ok=True)
                target.parent.rmdir()
        for old in self._link.parent.glob(f".{self._link.name}.*"):
            with contextlib.suppress(OSError):
                old.unlink()

    @property
    def target(self) -> str:
        """What gRPC binds."""
        return f"unix:{self.path}"

    def publish(self) -> None:
        """Point the address at this boot's socket, atomically.

        Raises:
            ConfigError: another daemon, started at the same time, was faster.
        """
        self._check_nobody_serves()
        self.path.chmod(0o600)
        temporary = self._link.with_name(f".{self._link.name}.link")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        destination = self.path if self._own_directory is not None else Path(self.path.name)
        temporary.symlink_to(destination)
        temporary.replace(self._link)

    def remove(self) -> None:
        """Remove the address, if it still is this boot's, and the socket."""
        with contextlib.suppress(OSError):
            if self._link.readlink().name == self.path.name:
                self._link.unlink()
        with contextlib.suppress(OSError):
            self.path.unlink()
        if self._own_directory is not None:
            with contextlib.suppress(OSError):
                self._own_directory.rmdir()


def why_not(address: Address) -> str:
    """Say why a TCP address cannot be bound, after a colon; gRPC tells only its own log."""
    if address.local:
        return ""
    try:
        for family, kind, protocol, _, name in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(name)
    except OSError as error:
        return f": {error.strerror}"
    return ""
