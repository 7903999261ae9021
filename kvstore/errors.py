"""Every error that kvstore raises, and whose fault each one is.

Expected outcomes (a miss, a full pool, a refused commit) are values, not exceptions. What is
raised is one of: the caller's fault (``ConfigError``, ``InvalidRequest``, ``StaleEpoch``,
``UnknownSpace``), the data's (``CorruptBlock``, ``FormatVersionError``), the device's
(``TierError``), or the daemon's absence (``ServerUnavailable``).
"""

from __future__ import annotations

__all__ = [
    "AttachmentLost",
    "Busy",
    "ClientClosed",
    "ConfigError",
    "CorruptBlock",
    "DeadlineExceeded",
    "FormatVersionError",
    "InvalidRequest",
    "KVStoreError",
    "LeaseLost",
    "NotImplementedByServer",
    "ServerUnavailable",
    "StaleEpoch",
    "TierClosed",
    "TierError",
    "TierFull",
    "TierUnavailable",
    "UnknownSpace",
]


class KVStoreError(Exception):
    """Base of all errors raised by kvstore."""


class ConfigError(KVStoreError):
    """A setting is unknown, impossible or unusable; the message is one line naming it."""


class InvalidRequest(KVStoreError):
    """The caller's arguments are wrong; nothing was changed.

    Attributes:
        field: name of the offending field.
    """

    def __init__(self, field: str, problem: str) -> None:
        """Build the one-line message ``field: problem``."""
        super().__init__(f"{field}: {problem}")
        self.field = field


class UnknownSpace(KVStoreError):
    """The daemon does not know this space (it restarted without it); open it again."""


class StaleEpoch(KVStoreError):
    """The space's epoch was bumped after this handle was opened: its blocks are gone for good."""


class LeaseLost(KVStoreError):
    """A lease ended while its slots were being read; the bytes read must not be used."""


class AttachmentLost(KVStoreError):
    """This process's attachment ended; grants and leases made through it are void."""


class ClientClosed(KVStoreError):
    """The client was closed, or this is a forked child of the process that opened it."""


class ServerUnavailable(KVStoreError):
    """No daemon answers at the address."""


class DeadlineExceeded(KVStoreError):
    """The call's deadline passed before the daemon answered."""


class Busy(KVStoreError):
    """The daemon is doing the same already, and does it once at a time; nothing was changed."""


class NotImplementedByServer(KVStoreError):
    """The daemon is reachable but does not implement this call."""


class FormatVersionError(KVStoreError):
    """Persistent data was written in a format version that this release does not read.

    Attributes:
        path: the file.
        found: version found in it.
    """

    def __init__(self, path: str, found: int, supported: int) -> None:
        """Build the one-line message."""
        super().__init__(f"{path}: format version {found} is not supported (this is {supported})")
        self.path = path
        self.found = found


class TierError(KVStoreError):
    """A tier could not do what was asked.

    Attributes:
        tier: name of the tier.
        errno: the operating system's error number, 0 when there is none.
    """

    def __init__(self, tier: str, message: str, errno: int = 0) -> None:
        """Build the one-line message ``tier tier: message``."""
        super().__init__(f"{tier} tier: {message}")
        self.tier = tier
        self.errno = errno


class TierFull(TierError):
    """No slot could be freed."""


class TierUnavailable(TierError):
    """The device behind the tier fails; the tier is degraded and tries again by itself."""


class TierClosed(TierError):
    """The tier was closed."""


class CorruptBlock(TierError):
    """Bytes do not match the digest taken when they were stored."""
