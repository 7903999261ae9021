"""`kvstore serve`: run the daemon."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["register"]


def _flag(names: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(names, help=text, metavar=metavar)


def serve(
    listen: Annotated[
        list[str] | None,
        _flag(
            "--listen",
            "Address to serve on: unix:///path or loopback host:port; repeatable. A socket in "
            "$XDG_RUNTIME_DIR/kvstore or /tmp if not given.",
            "ADDRESS",
        ),
    ] = None,
    state: Annotated[
        str | None,
        _flag(
            "--state",
            "Directory of the index. /var/lib/kvstore for root, else ~/.local/state/kvstore if not "
            "given.",
            "DIR",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        _flag("--config", "TOML file with the same settings; flags win.", "FILE"),
    ] = None,
    metrics: Annotated[
        str | None,
        _flag(
            "--metrics",
            "Serve a status page (/) and Prometheus metrics (/metrics) here: host:port.",
            "ADDRESS",
        ),
    ] = None,
    stop_timeout: Annotated[
        str | None, _flag("--stop-timeout", "How long a stop may write to disk; 20s.", "DURATION")
    ] = None,
    record: Annotated[
        str | None,
        _flag("--record", "Append a trace of requests for `kvstore replay`; hashed keys.", "FILE"),
    ] = None,
    log_level: Annotated[
        str | None, _flag("--log-level", "debug, info, warning or error; info.", "LEVEL")
    ] = None,
    log_format: Annotated[
        str | None, _flag("--log-format", "text, or json: every line one object; text.", "FORMAT")
    ] = None,
    host_pool: Annotated[
        str | None,
        _flag(
            "--host-pool",
            "Host memory to take, e.g. 8GiB: as it is needed, or at once when an engine on a GPU "
            "starts. auto: a quarter of what is available, 4GiB at most; so without it.",
            "SIZE",
        ),
    ] = None,
    disk: Annotated[
        str | None, _flag("--disk", "Directory of the disk tier; none without it.", "DIR")
    ] = None,
    disk_capacity: Annotated[
        str | None,
        _flag("--disk-capacity", "Disk to take, e.g. 2TiB; 80 % of what is free.", "SIZE"),
    ] = None,
    gpu_pool: Annotated[
        str | None,
        _flag(
            "--gpu-pool",
            "GPU memory to take on each device, e.g. 30% or 20GiB; none without it.",
            "SIZE",
        ),
    ] = None,
    gpu_devices: Annotated[
        str | None,
        _flag(
            "--gpu-devices", "Which devices, in the ranks' order, e.g. 0,1; all of them.", "LIST"
        ),
    ] = None,
    gpu_io: Annotated[
        str | None,
        _flag(
            "--gpu-io",
            "From disk to the GPU pool: through the host tier (host), by cuFile (cufile), or by "
            "cuFile if kvikio is installed (auto); auto.",
            "HOW",
        ),
    ] = None,
    write_policy: Annotated[
        str | None,
        _flag(
            "--write-policy",
            "Write blocks to disk soon (through), when they are used again (reused) or when they "
            "leave memory (evict); through.",
            "POLICY",
        ),
    ] = None,
    disk_budget: Annotated[
        str | None,
        _flag("--disk-budget", "Most bytes to write to disk in 24 hours, e.g. 500GiB.", "SIZE"),
    ] = None,
    disk_throttle: Annotated[
        str | None,
        _flag(
            "--disk-throttle",
            "Most bytes a second to read and write on disk, e.g. 500MB/s; for a disk shared with "
            "others, and for trials.",
            "RATE",
        ),
    ] = None,
    default_quota: Annotated[
        str | None,
        _flag(
            "--default-quota",
            "Most a space takes in each tier, e.g. host=8GiB,disk=1TiB; `kvstore quota` sets others.",
            "SIZES",
        ),
    ] = None,
    default_ttl: Annotated[
        str | None,
        _flag(
            "--default-ttl",
            "Drop blocks that nobody used for so long, e.g. 7d; `kvstore ttl` sets others.",
            "DURATION",
        ),
    ] = None,
    warm_up: Annotated[
        str | None,
        _flag(
            "--warm-up",
            "Most bytes to bring from disk to memory at the start, those used last; 0: nothing. "
            "A quarter of the pool if not given.",
            "SIZE",
        ),
    ] = None,
    io_threads: Annotated[
        int | None, _flag("--io-threads", "Threads of the disk tier; 4.", "N")
    ] = None,
    discard_host: Annotated[
        bool | None,
        _flag(
            "--discard-host/--keep-host",
            "Ignore the host contents that the last run saved.",
        ),
    ] = None,
    save_host: Annotated[
        bool | None,
        _flag(
            "--save-host/--no-save-host",
            "Keep host contents in memory when stopped, for the next start.",
        ),
    ] = None,
    lease_ttl: Annotated[
        str | None,
        _flag("--lease-ttl", "Silence after which a client's leases end; 10s.", "DURATION"),
    ] = None,
    heartbeat: Annotated[
        str | None, _flag("--heartbeat", "How often clients report; 1s.", "DURATION")
    ] = None,
    lease_cap: Annotated[
        str | None,
        _flag("--lease-cap", "Most bytes one client may lease; half of the pool.", "SIZE"),
    ] = None,
    grant_cap: Annotated[
        str | None,
        _flag("--grant-cap", "Most bytes one client may be granted; half of the pool.", "SIZE"),
    ] = None,
) -> int:
    """Run the daemon; it prints one line once it serves.

    Works without any argument. SIGTERM stops it after saving what it holds.
    """
    from kvstore import log_lines
    from kvstore.config import load_config, wanted_log_format
    from kvstore.errors import KVStoreError

    flags = {
        "listen": listen or None,
        "state": state,
        "host_pool": host_pool,
        "disk": disk,
        "disk_capacity": disk_capacity,
        "gpu_pool": gpu_pool,
        "gpu_devices": gpu_devices,
        "gpu_io": gpu_io,
        "write_policy": write_policy,
        "disk_budget": disk_budget,
        "disk_throttle": disk_throttle,
        "default_quota": default_quota,
        "default_ttl": default_ttl,
        "warm_up": warm_up,
        "metrics": metrics,
        "stop_timeout": stop_timeout,
        "discard_host": discard_host,
        "save_host": save_host,
        "lease_ttl": lease_ttl,
        "heartbeat": heartbeat,
        "lease_cap": lease_cap,
        "grant_cap": grant_cap,
        "io_threads": io_threads,
        "record": record,
        "log_level": log_level,
        "log_format": log_format,
    }
    as_json = wanted_log_format(flags, config) == "json"
    # gRPC's core prints past every logger, in a form of its own.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        settings = load_config(flags, config)
        # Imported once the settings are known to be good: a typo answers at once.
        from kvstore.server import serve as run

        return run(settings)
    except KVStoreError as error:
        if not as_json:
            raise
        print(log_lines.line("error", str(error)), file=sys.stderr, flush=True)
        return 1


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)
