"""Settings of the daemon: parsed once at the edge, frozen afterwards.

A setting comes from a flag, else from the TOML file, else from its default. Keys of the file are
the flags without the dashes in front (``host_pool = "8GiB"``; ``host-pool`` is the same key).
Unknown keys are refused. The environment is read here and in `kvstore.address`; what a service
manager puts there in `kvstore.server.service_manager`, OpenTelemetry's in `kvstore.tracing`.

Every problem is a ``ConfigError`` of one line that starts with the name of the setting.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import ipaddress
import os
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import psutil
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from kvstore.address import Address, default_address, parse_address
from kvstore.cgroup import memory_limit
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.units import GIB, MIB, PAGE_BYTES, format_bytes, parse_bytes, parse_seconds

__all__ = [
    "ServeConfig",
    "WritePolicy",
    "default_state_directory",
    "load_config",
    "pool_prefix",
    "wanted_log_format",
]

# "auto" takes this share of what is available, and never more than this many bytes: the default
# must be harmless on a workstation, and whoever has a server gives a size.
_AUTO_SHARE: Final = 0.25
_AUTO_CAP_BYTES: Final = 4 * GIB
# One slab of the smallest size with room for a handful of blocks.
_MIN_HOST_POOL_BYTES: Final = 16 * MIB
# The rest is for engines: a pool that takes nearly all of a device was a slip of the keyboard.
_MAX_GPU_SHARE: Final = 0.95
_SHARED_MEMORY: Final = Path("/dev/shm")
_TIERS: Final = ("gpu", "host", "disk")


class WritePolicy(StrEnum):
    """When a block is written to disk."""

    THROUGH = "through"  # soon after it was committed
    REUSED = "reused"  # when it is used again after it was stored
    EVICT = "evict"  # when it leaves host memory


def default_state_directory() -> Path:
    """Return ``/var/lib/kvstore`` for root, else the user's state directory (XDG)."""
    if os.geteuid() == 0:
        return Path("/var/lib/kvstore")
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "kvstore"


def pool_prefix(state: Path) -> str:
    """Return how the names of the pools of a state directory begin."""
    digest = hashlib.sha256(os.fsencode(state.resolve())).hexdigest()[:12]
    return f"kvstore-{os.geteuid()}-{digest}-"


def _own_bytes(state: Path) -> int:
    """Return the memory in pools of earlier daemons: the next one adopts or removes them."""
    pools = _SHARED_MEMORY.glob(pool_prefix(state) + "*")
    try:
        return sum(file.lstat().st_blocks * 512 for pool in pools for file in pool.iterdir())
    except OSError:
        return 0


def _auto_host_pool_bytes(state: Path) -> int:
    """Return the host pool's size for ``auto``, a whole number of MiB.

    Args:
        state: the state directory, whose earlier pools do not count as taken.

    Raises:
        ConfigError: there is too little memory for any pool.
    """
    own = _own_bytes(state)
    available = psutil.virtual_memory().available + own
    limit = memory_limit()
    if limit is not None:
        available = min(available, limit.room_bytes + own)
    shared = os.statvfs(_SHARED_MEMORY)
    free_shared = shared.f_bavail * shared.f_frsize + own
    size = min(int(available * _AUTO_SHARE), _AUTO_CAP_BYTES, int(free_shared * 0.8))
    size -= size % MIB
    if size < _MIN_HOST_POOL_BYTES:
        raise ConfigError(
            f"host_pool: auto finds too little memory ({format_bytes(available)} available, "
            f"{format_bytes(free_shared)} free in {_SHARED_MEMORY}); give a size"
        )
    return size


def _size(value: object) -> object:
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except ConfigError as e:
        raise ValueError(str(e)) from e


def _duration(value: object) -> object:
    try:
        return parse_seconds(value) if isinstance(value, str) else value
    except ConfigError as e:
        raise ValueError(str(e)) from e


def _directory(value: object) -> object:
    """Make a path absolute, so that a later ``chdir`` cannot move it."""
    if isinstance(value, str | Path):
        if not str(value):
            raise ValueError("must not be empty")
        return Path(value).expanduser().absolute()
    return value


def _address(value: object) -> object:
    try:
        return parse_address(value) if isinstance(value, str) else value
    except InvalidRequest as e:
        raise ValueError(str(e).removeprefix("address: ")) from e


def _default_listen() -> tuple[Address, ...]:
    try:
        return (default_address(),)
    except InvalidRequest as e:
        raise ConfigError(f"KVSTORE_ADDRESS: {str(e).removeprefix('address: ')}") from e


def _on_this_machine(address: Address) -> Address:
    """Refuse TCP addresses that other machines could reach: nothing protects them."""
    if address.local or address.host == "localhost":
        return address
    try:
        loopback = ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        raise ValueError(f"'{address}': give an IP address or localhost") from None
    if not loopback:
        raise ValueError(
            f"'{address}' is not a loopback address: others would need no password; from another "
            "machine, use a tunnel (ssh -L)"
        )
    return address


def _tcp(value: object) -> object:
    address = value
    if isinstance(value, str):
        with contextlib.suppress(InvalidRequest):
            address = parse_address(value)
    if isinstance(address, str) or (isinstance(address, Address) and address.local):
        raise ValueError(f"'{address}' is not host:port")
    return address


def _gpu_pool(value: object) -> object:
    """Return the pool's size per device: a part of its memory below 1, or bytes."""
    text = str(value).strip()
    if not text.endswith("%"):
        size = _size(text) if isinstance(value, str) else value
        if isinstance(size, int | float) and 0 < size < MIB:
            raise ValueError(f"{text!r}: at least {format_bytes(MIB)}, or 0 for no pool")
        return size
    try:
        part = float(text[:-1]) / 100
    except ValueError:
        raise ValueError(f"{text!r}: give a size, or a percentage of each device") from None
    if not 0 <= part <= _MAX_GPU_SHARE:
        raise ValueError(f"{text!r}: must be within 0% … {_MAX_GPU_SHARE:.0%}")
    return part


def _gpu_devices(value: object) -> object:
    """Return names of devices from a list, or from a text with commas between them."""
    if isinstance(value, str):
        return () if value.strip() in ("", "all") else tuple(map(str.strip, value.split(",")))
    return tuple(map(str, value)) if isinstance(value, list) else value


def _per_second(value: object) -> object:
    return _size(value.removesuffix("/s") if isinstance(value, str) else value)


def _per_day(value: object) -> object:
    return _size(value.removesuffix("/day") if isinstance(value, str) else value)


def _quotas(value: object) -> object:
    """Return bytes by tier from ``host=8GiB,disk=1TiB`` or a table of TOML."""
    if isinstance(value, str):
        parts = [part.partition("=") for part in value.split(",") if part.strip()]
        names = [name.strip() for name, _, _ in parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is given twice")
        value = {name.strip(): size.strip() for name, _, size in parts}
    if not isinstance(value, dict):
        return value
    for name in value:
        if name not in _TIERS:
            raise ValueError(f"{name!r} is not one of {', '.join(_TIERS)}: write host=8GiB")
    return value


# Strict: TOML's `true` is no size. What is larger than this no message could say.
_DAY: Final = 86400.0
_ANY_BYTES: Final = Field(strict=True, le=1 << 62)
_ANY_SECONDS: Final = Field(strict=True, allow_inf_nan=False, le=1e15)
Size = Annotated[int, BeforeValidator(_size), _ANY_BYTES]
PerSecond = Annotated[int, BeforeValidator(_per_second), _ANY_BYTES]
DailyBytes = Annotated[int, BeforeValidator(_per_day), _ANY_BYTES]
Duration = Annotated[float, BeforeValidator(_duration), _ANY_SECONDS]
Directory = Annotated[Path, BeforeValidator(_directory)]
AnyAddress = Annotated[Address, BeforeValidator(_address)]


class ServeConfig(BaseModel):
    """What ``kvstore serve`` runs with. Sizes are in bytes, durations in seconds.

    Attributes:
        listen: addresses to serve on, Unix sockets or loopback TCP.
        state: state directory; always there: lock, sockets, LMDB, epochs, pins.
        host_pool: bytes of the host tier; ``auto`` is a quarter of the available memory, within
            what ``/dev/shm`` and the cgroup allow, at most 4 GiB.
        disk: directory of the disk tier; None: there is no disk tier.
        disk_capacity: bytes of the disk tier; None: 80 % of the file system's free space.
        gpu_pool: bytes of the GPU tier on each device; below 1: that part of the device's memory;
            0: there is no GPU tier.
        gpu_devices: devices of the GPU tier in the order of the ranks, as numbers or UUIDs; none:
            all; ``simulated:N``: N devices of shared memory, to try the tier without a GPU.
        gpu_io: how blocks go from disk to the GPU pool: ``host``, through the host tier; ``cufile``,
            by kvikio; ``auto``: by kvikio if it is installed.
        write_policy: when blocks are written to disk.
        disk_budget: bytes that may be written to disk in any 24 hours; None: no limit.
        disk_throttle: bytes a second that the disk tier reads and writes at most, all together;
            None: no limit.
        default_quota: most bytes that a space takes, by tier, unless it has a quota of its own.
        default_ttl_s: how long what nobody uses stays in spaces without a time to live of their own;
            None: as long as there is room.
        warm_up: most bytes that go from disk to the host tier at the start, those used last;
            a quarter of the pool if not given.
        metrics: TCP address of the Prometheus endpoint; None: none.
        stop_timeout_s: how long a stop may flush.
        discard_host: ignore saved host contents at start.
        save_host: keep host contents in memory at a stop, for the next start.
        lease_ttl_s: leases of an attachment silent for that long expire.
        heartbeat_s: interval at which attachments report.
        lease_cap: most bytes that one client may hold leases on.
        grant_cap: most bytes that one client may hold grants on.
        io_threads: threads of the disk tier.
        record: file that takes a trace of what is asked for; None: nobody records.
        log_level: lowest level that is logged.
        log_format: ``text`` or ``json``, one object a line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    listen: tuple[Annotated[AnyAddress, AfterValidator(_on_this_machine)], ...] = Field(
        default_factory=_default_listen, min_length=1
    )
    state: Directory = Field(default_factory=default_state_directory)
    host_pool: Annotated[Size, Field(ge=_MIN_HOST_POOL_BYTES)] = 0  # auto: see `_check`
    disk: Directory | None = None
    disk_capacity: Annotated[Size, Field(ge=_MIN_HOST_POOL_BYTES)] | None = None
    gpu_pool: Annotated[
        float, BeforeValidator(_gpu_pool), Field(ge=0, strict=True, allow_inf_nan=False)
    ] = 0
    gpu_devices: Annotated[tuple[str, ...], BeforeValidator(_gpu_devices)] = ()
    gpu_io: Literal["auto", "host", "cufile"] = "auto"
    write_policy: WritePolicy = WritePolicy.THROUGH
    disk_budget: Annotated[DailyBytes, Field(ge=MIB)] | None = None
    disk_throttle: Annotated[PerSecond, Field(gt=0)] | None = None
    default_quota: Annotated[dict[str, Annotated[Size, Field(ge=0)]], BeforeValidator(_quotas)] = (
        Field(default_factory=dict)
    )
    default_ttl_s: Annotated[Duration, Field(ge=0.001)] | None = Field(None, alias="default_ttl")
    warm_up: Annotated[Size, Field(ge=0)] | None = None
    metrics: Annotated[Address, BeforeValidator(_tcp)] | None = None
    stop_timeout_s: Annotated[Duration, Field(ge=0)] = Field(20.0, alias="stop_timeout")
    discard_host: bool = False
    save_host: bool = True
    lease_ttl_s: Annotated[Duration, Field(gt=0, le=_DAY)] = Field(10.0, alias="lease_ttl")
    heartbeat_s: Annotated[Duration, Field(gt=0, le=_DAY)] = Field(1.0, alias="heartbeat")
    lease_cap: Annotated[Size, Field(ge=PAGE_BYTES)] = 0
    grant_cap: Annotated[Size, Field(ge=PAGE_BYTES)] = 0
    io_threads: Annotated[int, Field(ge=1, le=128)] = 4
    record: Directory | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Replace ``auto`` and derive the caps, so that the finished model has plain numbers."""
        values = dict(values)
        if values.get("host_pool") == "auto":
            del values["host_pool"]
        return values

    @model_validator(mode="after")
    def _check(self) -> ServeConfig:
        """Check what settings must hold together, and fill in those that follow from others."""
        if self.host_pool == 0:
            object.__setattr__(self, "host_pool", _auto_host_pool_bytes(self.state))
        for name in ("lease_cap", "grant_cap"):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, self.host_pool // 2)
        if len(set(self.listen)) < len(self.listen):
            raise ValueError("listen: names an address twice")
        if self.heartbeat_s * 2 > self.lease_ttl_s:
            raise ValueError("heartbeat: must be at most half of lease_ttl")
        if self.gpu_devices and not self.gpu_pool:
            raise ValueError("gpu_devices: needs gpu_pool")
        if self.disk is None and self.disk_capacity is not None:
            raise ValueError("disk_capacity: needs disk")
        if self.disk is None and self.disk_budget is not None:
            raise ValueError("disk_budget: needs disk")
        if self.disk is not None and self.disk == self.state:
            raise ValueError("disk: must not be the state directory itself")
        return self


_KEYS: Final = tuple(field.alias or name for name, field in ServeConfig.model_fields.items())


def _read_file(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file, its keys with underscores.

    Raises:
        ConfigError: the file cannot be read or parsed, or names a key twice.
    """
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except OSError as e:
        raise ConfigError(f"config: {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"config: {path}: not TOML: {e}") from e
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name in values:
            raise ConfigError(f"{name}: given twice in {path}")
        values[name] = [value] if name == "listen" and isinstance(value, str) else value
    return values


def _one_line(error: ValidationError) -> str:
    """Say the first problem as ``setting: what is wrong with it``."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, _KEYS, n=1)
        return f"{name}: unknown setting" + (f" (did you mean {close[0]}?)" if close else "")
    text = first["msg"].removeprefix("Value error, ")
    least = first.get("ctx", {}).get("ge", 0)
    if first["type"] == "greater_than_equal" and least >= PAGE_BYTES:  # of a size
        text = f"{first['input']!r} is too little: at least {format_bytes(least)}"
        if str(first["input"]).isdecimal():
            text += "; sizes without a unit are bytes"
    elif first["type"] not in ("value_error", "missing"):
        text = f"{first['input']!r}: {text.removeprefix('Input ')}"
    return (f"{name}: {text}" if name else text).replace("\n", " ")


def wanted_log_format(flags: Mapping[str, Any], file: Path | None = None) -> str:
    """Return the `log_format` that is asked for, also where the other settings cannot be read."""
    chosen = flags.get("log_format")
    if chosen is None and file is not None:
        with contextlib.suppress(ConfigError):
            chosen = _read_file(file).get("log_format")
    return str(chosen or "text")


def load_config(flags: Mapping[str, Any], file: Path | None = None) -> ServeConfig:
    """Combine flags, file and defaults.

    Args:
        flags: settings given on the command line, by key; None means not given.
        file: TOML file.

    Raises:
        ConfigError: one line that names the setting.
    """
    values = _read_file(file) if file is not None else {}
    values |= {key: value for key, value in flags.items() if value is not None}
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as e:
        raise ConfigError(_one_line(e)) from e
