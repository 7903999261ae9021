"""One run of the daemon, from an empty process to its exit code.

1. Lock the state directory (flock): one daemon per state directory, whatever else is shared.
2. Open the store; after an unclean stop a child process has checked it first.
3. Look for a pool that the last run kept; remove the others that dead daemons of this state
   directory left in shared memory.
4. Open the tiers, recover the index, adopt what lies in the pool.
5. Bind sockets, invalidate the saved host index, serve, publish the socket addresses, print the
   ready line, tell the service manager.
6. On SIGTERM, SIGINT or SIGHUP: save the host index, flush within the time allowed, say goodbye, close,
   mark the store clean.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import resource
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from grpc import aio
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import kvstore
from kvstore import tracing
from kvstore.address import machine_id
from kvstore.config import WritePolicy, pool_prefix
from kvstore.engine import Engine
from kvstore.engine.budget import DiskBudget
from kvstore.engine.host_index import HOST_INDEX_NAME
from kvstore.engine.recorder import Recorder
from kvstore.engine.speeds import Speeds
from kvstore.errors import ConfigError, KVStoreError
from kvstore.index import SpaceLimits
from kvstore.index.lmdb_store import MetaStore
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc as rpc
from kvstore.server.admin_service import AdminService
from kvstore.server.gpu_pool import gpu_reader, gpu_tier
from kvstore.server.kept_pool import find_kept_pool
from kvstore.server.kv_service import KVStoreService
from kvstore.server.logs import say_ready, set_up_logging
from kvstore.server.loop_slices import SliceSelector
from kvstore.server.reading import CarefulServer
from kvstore.server.service_manager import ServiceManager
from kvstore.server.sockets import BootSocket, why_not
from kvstore.server.web import serve_web
from kvstore.syncpoint import arm_from_environment
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_directory import make_directory
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool_directory import remove_stale_pools
from kvstore.tiers.throttled import Throttled
from kvstore.units import format_bytes
from kvstore.wire import server_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.address import Address
    from kvstore.config import ServeConfig
    from kvstore.engine.host_index import HostIndex

__all__ = ["serve"]

log = logging.getLogger("kvstore")

_SHARED_MEMORY: Final = Path("/dev/shm")
_DISK_SHARE: Final = 0.8
_STATE_ROOM_BYTES: Final = 1 << 20
_GRACE_SECONDS: Final = 1.0
_FEW_FILES: Final = 1024
# A terminal that goes away must not cost what is in memory.
_STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The index has no cycles: garbage is what calls leave behind. Taking away 50,000 objects of it at
# a time stops the loop for 80 ms, 5,000 for 8; a full collection looks at every block, and is rare.
_GC_THRESHOLD: Final = (5_000, 20, 1_000)
# gRPC cancels new calls by lot when more than 1,000 (3,000: all) wait for the loop. A daemon that
# was stopped for a moment finds more than that; each waits for about 100 µs of the loop.
_PENDING_CALLS: Final = (
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
)


def _set_up_tracing() -> None:
    """Record spans if the environment asks for it; a daemon that cannot serves all the same."""
    exporter = tracing.wanted()
    if not exporter:
        return
    try:
        tracing.set_up("kvstore", kvstore.__version__)
    except tracing.TracingUnavailable as error:
        log.warning("no traces: %s", error)
    else:
        log.info("traces are exported: %s", exporter)


def _lock_state(state: Path) -> int:
    """Create and lock the state directory; return the lock's descriptor.

    Raises:
        ConfigError: another daemon holds it, or it is unusable.
    """
    try:
        make_directory(state.absolute())
        fd = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"state: {error.filename or state}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(
            f"state: {state} is in use by another daemon (pid {holder or 'unknown'})"
        ) from error
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"state: {state / 'lock'}: {error.strerror}") from error
    return fd


def _check_room(state: Path) -> None:
    """Refuse a state directory without room, before anything in it is touched.

    LMDB maps files that it has not written to yet: on a full file system that is fatal (SIGBUS),
    and an index that cannot be opened would be taken for a damaged one.

    Raises:
        ConfigError: its file system is full, or does not work.
    """
    try:
        with tempfile.TemporaryFile(dir=state) as scratch:
            os.posix_fallocate(scratch.fileno(), 0, _STATE_ROOM_BYTES)
    except OSError as error:
        needed = format_bytes(_STATE_ROOM_BYTES)
        raise ConfigError(f"state: {state} needs {needed} of room: {error.strerror}") from error


def _disk_capacity(config: ServeConfig) -> int:
    """Return the disk tier's capacity: as configured, else a share of what is free."""
    assert config.disk is not None
    if config.disk_capacity is not None:
        return config.disk_capacity
    make_directory(config.disk.absolute())
    stat = os.statvfs(config.disk)
    # Segments that are there already are not free space, but they are ours.
    ours = sum(f.stat().st_size for f in config.disk.glob("seg-*.kvs"))
    size = int((stat.f_bavail * stat.f_frsize + ours) * _DISK_SHARE)
    return max(1 << 20, size - size % (1 << 20))


def _build(config: ServeConfig, store: MetaStore, pool: Path) -> Engine:
    gpu = gpu_tier(config, pool)
    host = HostTier(pool, config.host_pool, pinner=gpu)
    disk = budget = None
    if config.disk is not None:
        try:
            capacity = _disk_capacity(config)
        except OSError as error:
            raise ConfigError(f"disk: {config.disk}: {error.strerror}") from error
        disk = DiskTier(config.disk, capacity, threads=config.io_threads)
        if config.disk_throttle is not None:
            disk = cast("DiskTier", Throttled(disk, config.disk_throttle))
        if config.disk_budget is not None:
            budget = DiskBudget(config.state / "disk-budget", config.disk_budget)
    return Engine(
        host,
        disk,
        store,
        gpu=gpu,
        gpu_reader=gpu_reader(config, disk, gpu),
        flush_on_commit=config.write_policy is WritePolicy.THROUGH,
        flush_on_reuse=config.write_policy is WritePolicy.REUSED,
        budget=budget,
        speeds=Speeds(config.state / "speeds"),
        lease_ttl_seconds=config.lease_ttl_s,
        lease_cap_bytes=config.lease_cap,
        grant_cap_bytes=config.grant_cap,
        warm_up_bytes=config.host_pool // 4 if config.warm_up is None else config.warm_up,
        default_limits=_default_limits(config),
    )


def _default_limits(config: ServeConfig) -> SpaceLimits:
    ttl = config.default_ttl_s
    sizes = {f"{tier}_bytes": size for tier, size in config.default_quota.items()}
    return SpaceLimits(**sizes, ttl_ms=None if ttl is None else round(ttl * 1e3))


def _ready(
    config: ServeConfig,
    bound: Sequence[Address],
    engine: Engine,
    boot_id: bytes,
    metrics: Address | None,
) -> dict[str, str]:
    """Return what the ready line says."""
    disk = "none"
    if engine.disk is not None:
        capacity = format_bytes(engine.disk.usage().capacity_bytes).replace(" ", "")
        disk = f"{capacity}:{engine.recovered_blocks}blocks:{engine.disk.io_engine}"
    listen = ",".join(str(address) for address in bound)
    host = format_bytes(config.host_pool).replace(" ", "")
    if engine.adopted_blocks:
        host += f":{engine.adopted_blocks}blocks"
    gpu = "none"
    if engine.gpu is not None:
        size = format_bytes(engine.gpu.usage().capacity_bytes).replace(" ", "")
        gpu = f"{size}:{len(engine.gpu.devices)}devices"
    fields = {"listen": listen, "boot_id": boot_id.hex(), "host": host, "disk": disk, "gpu": gpu}
    if metrics is not None:
        fields["metrics"] = str(metrics)
    return fields


async def _bind(
    server: aio.Server, config: ServeConfig, boot_name: str
) -> tuple[list[BootSocket], list[Address]]:
    """Bind every address; return the sockets to publish and the addresses as bound."""
    sockets: list[BootSocket] = []
    bound: list[Address] = []
    for address in config.listen:
        try:
            if address.local:
                socket = BootSocket(address, boot_name)
                server.add_insecure_port(socket.target)
                sockets.append(socket)
                bound.append(address)
            else:
                # Port 0 asks for any free one.
                port = server.add_insecure_port(str(address))
                bound.append(replace(address, port=port))
        except RuntimeError as error:
            for other in sockets:
                other.remove()
            raise ConfigError(f"listen: cannot bind {address}{why_not(address)}") from error
    return sockets, bound


async def _run(
    config: ServeConfig,
    store: MetaStore,
    pool: Path,
    boot_id: bytes,
    saved: HostIndex | None,
    selector: SliceSelector,
) -> None:
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[str] = loop.create_future()

    def on_signal(name: str) -> None:
        if stop.done():
            log.warning("%s again: already stopping", name)
        else:
            stop.set_result(name)

    for number in _STOPS:
        # `nohup` has the daemon outlive its terminal.
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        loop.add_signal_handler(number, on_signal, number.name)
    engine = _build(config, store, pool)
    # Recovery makes several objects a block, none of them garbage: collecting meanwhile doubles
    # the time to start, and a full collection later would stop the loop for as long.
    gc.disable()
    await engine.start(saved)
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLD)
    gc.enable()
    server = aio.server(options=[*server_options(), *_PENDING_CALLS])
    careful = CarefulServer(server)
    rpc.add_KVStoreServicer_to_server(  # type: ignore[no-untyped-call]
        KVStoreService(
            engine,
            boot_id,
            heartbeat_ms=round(config.heartbeat_s * 1e3),
            ttl_ms=round(config.lease_ttl_s * 1e3),
        ),
        careful,
    )
    rpc.add_AdminServicer_to_server(  # type: ignore[no-untyped-call]
        AdminService(engine, boot_id, config), careful
    )
    checker = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    services = [s.full_name for s in pb.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection(
        [*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    sockets: list[BootSocket] = []
    beside = contextlib.ExitStack()
    manager = ServiceManager()
    beside.callback(manager.close)
    host_index = config.state / HOST_INDEX_NAME
    try:
        sockets, bound = await _bind(server, config, boot_id.hex()[:12])
        metrics = config.metrics
        if metrics is not None:
            port = beside.enter_context(serve_web(engine, boot_id, metrics))
            metrics = replace(metrics, port=port)
        if config.record is not None:
            recorder = Recorder(config.record, engine.counters)
            beside.callback(recorder.close)
            recorder.start()
            engine.record(recorder)
        # From here on slots are granted; a start that failed before leaves everything as it was.
        engine.begin(host_index)
        selector.measure(engine.counters)
        await server.start()
        for name in ["", *services]:
            await checker.set(name, health_pb2.HealthCheckResponse.SERVING)
        for socket in sockets:
            socket.publish()
        manager.ready(say_ready(config, _ready(config, bound, engine, boot_id, metrics)))
        reason = await stop
        log.info("%s: stopping", reason)
        manager.stopping(config.stop_timeout_s)
        begun = time.monotonic()
        await checker.enter_graceful_shutdown()
        await engine.quiesce(
            config.stop_timeout_s, host_index if config.save_host else None, machine_id()
        )
        log.info("saved and flushed in %.2f s", time.monotonic() - begun)
        for socket in sockets:
            socket.remove()
        await engine.farewell(f"stopped by {reason}")
        await server.stop(_GRACE_SECONDS)
    finally:
        beside.close()
        await server.stop(None)
        for socket in sockets:
            socket.remove()
        await engine.close()


def _raise_open_files() -> None:
    """Allow as many open files as the system lets us: segments, slabs and clients each take some.

    The usual soft limit of 1,024 is meant for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
        log.warning(
            "only %d open files are allowed (ulimit -n; in a unit, LimitNOFILE=): clients that are "
            "too many get no answer",
            hard,
        )


def serve(config: ServeConfig) -> int:
    """Run the daemon until it is told to stop; return the exit code.

    Raises:
        ConfigError, FormatVersionError: it cannot start; one line says why.
    """
    set_up_logging(config)
    _set_up_tracing()
    # The loop must get the interpreter back quickly from threads that hash and copy.
    sys.setswitchinterval(0.001)
    _raise_open_files()
    arm_from_environment()
    lock = _lock_state(config.state)
    try:
        _check_room(config.state)
        boot_id = os.urandom(16)
        store, note = MetaStore.open_or_reset(config.state)
        if note is not None:
            log.warning("%s", note)
        try:
            store.mark_open()
            prefix = pool_prefix(config.state)
            saved = find_kept_pool(
                config.state, _SHARED_MEMORY, prefix, machine_id(), discard=config.discard_host
            )
            fresh = _SHARED_MEMORY / f"{prefix}{boot_id.hex()[:12]}"
            pool = fresh if saved is None else saved.pool
            remove_stale_pools(_SHARED_MEMORY, prefix, pool)
            selector = SliceSelector()
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
                runner.run(_run(config, store, pool, boot_id, saved, selector))
            store.mark_clean()
        finally:
            store.close()
    except KVStoreError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot start: {error}") from error
    finally:
        os.close(lock)
        tracing.close()
    return 0
