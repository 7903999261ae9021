"""`kvstore replay`: what tiers of some size would have done with a trace."""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.cli.connect import JsonOption
from kvstore.cli.output import console, count, make_table, print_json, shorten
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvstore.cli.measured import MeasuredDaemon
    from kvstore.replay import (
        CostModel,
        Prices,
        Recommendation,
        Request,
        SizeResult,
        TraceSpace,
    )

__all__ = ["register"]

_TICK_REQUESTS: Final = 500


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(name, help=text, metavar=metavar)


def _rate(name: str, text: str) -> float:
    """Return the bytes per second that ``5GB/s`` or ``5GB`` means."""
    rate = parse_bytes(text.removesuffix("/s"))
    if rate < 1:
        raise InvalidRequest(name, f"{text!r}: at least one byte per second")
    return float(rate)


def _part(text: str) -> float:
    """Return what ``5%``, ``5`` or ``0.05`` means; below 1 it is a part, else percent."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1000:
        raise InvalidRequest("recommend", f"{text!r}: write percent such as 5%")
    return value / 100 if text.endswith("%") or value >= 1 else value


@contextlib.contextmanager
def _ticker() -> Iterator[Callable[[Request], None] | None]:
    """Give what shows progress on a terminal, None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    requests = 0

    def tick(_: Request) -> None:
        nonlocal requests
        requests += 1
        if requests % _TICK_REQUESTS == 0:
            print(f"\r{requests:,} requests", end="", file=sys.stderr, flush=True)

    yield tick
    print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _daemon(host: int, disk: int, policy: str, block: TraceSpace) -> Iterator[MeasuredDaemon]:
    from kvstore.cli.child import interruptible
    from kvstore.cli.measured import measured_daemon

    with (
        interruptible(),
        measured_daemon(host, disk, policy, block.block_tokens, block.block_bytes) as daemon,
    ):
        yield daemon


def _taken(requests: Iterable[Request], daemon: MeasuredDaemon) -> Iterator[Request]:
    """Yield requests after a daemon has served them."""
    for request in requests:
        daemon.step(request.keys)
        yield request


def _compared(predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured with what was predicted, and how far that is off."""
    return {
        name: {
            "predicted": predicted[name],
            "measured": value,
            "off_percent": 100 * (predicted[name] - value) / value if value else None,
        }
        for name, value in measured.items()
    }


def _generate(requests: int, seed: int) -> int:
    from kvstore.replay import synthetic_lines

    for line in synthetic_lines(requests, seed):
        print(line)
    return 0


def _model(cost: CostModel, policy: str, token_bytes: int) -> dict[str, Any]:
    return {
        "token_bytes": token_bytes,
        "write_policy": policy,
        "prefill_tokens_per_second": cost.prefill,
        "host_read_bytes_per_second": cost.host_read,
        "disk_read_bytes_per_second": cost.disk_read,
        "disk_write_bytes_per_second": cost.disk_write,
        "engines": cost.engines,
    }


def _recommended(chosen: Recommendation) -> dict[str, Any]:
    choice, best = chosen.choice, chosen.best
    return {
        "within_percent": 100 * chosen.within,
        "host_bytes": choice.as_json()["host_bytes"],
        "disk_bytes": choice.as_json()["disk_bytes"],
        "price": chosen.price,
        "ttft_mean_seconds": choice.ttft.mean,
        "best_host_bytes": best.as_json()["host_bytes"],
        "best_disk_bytes": best.as_json()["disk_bytes"],
        "best_price": chosen.best_price,
        "best_ttft_mean_seconds": best.ttft.mean,
    }


def _print_results(results: list[SizeResult]) -> None:
    disks = any(r.size.disk for r in results)
    left = ["host", "disk"] if disks else ["host"]
    hits = ["host", "disk"] if disks else []
    written = ["written"] if disks else []
    table = make_table("", left, ["block %", "token %", *hits, "mean", "p50", "p95", *written])
    for r in results:
        fields = r.as_json()
        row = [r.size.host_text, *([r.size.disk_text] if disks else [])]
        row += [f"{r.block_hit_rate:.2f}", f"{r.token_hit_rate:.2f}"]
        if disks:
            row += [f"{fields['token_hit_rate_host']:.1f}", f"{fields['token_hit_rate_disk']:.1f}"]
        ttft = fields["ttft_seconds"]
        row += [format_seconds(ttft[name]) for name in ("mean", "p50", "p95")]
        if disks:
            row += [format_bytes(r.pool.written_bytes) if r.size.disk else "–"]
        table.add_row(*row)
    console().print(table)


def _print_recommendation(chosen: Recommendation) -> None:
    choice, best = chosen.choice.size, chosen.best.size

    def named(host: str, disk: str) -> str:
        return f"{host} host" + (f" + {disk} disk" if disk != "–" else "")

    print(
        f"recommended: {named(choice.host_text, choice.disk_text)} for {chosen.price:,.0f}: "
        f"mean {format_seconds(chosen.choice.ttft.mean)}"
    )
    print(
        f"best of these: {named(best.host_text, best.disk_text)} for {chosen.best_price:,.0f}: "
        f"mean {format_seconds(chosen.best.ttft.mean)}"
    )
    print(f"(the cheapest of those within {100 * chosen.within:g} % of the best mean)")


def _print_measured(measured: dict[str, Any]) -> None:
    table = make_table("beside a real daemon", [""], ["predicted", "measured", "off"])
    for name, row in measured.items():
        off = "–" if row["off_percent"] is None else f"{row['off_percent']:+.1f} %"
        shown = [format_bytes(row[by]) for by in ("predicted", "measured")]
        if not name.endswith("bytes"):
            shown = [f"{row[by]:,}" for by in ("predicted", "measured")]
        table.add_row(name.replace("_", " "), *shown, off)
    console().print(table)


def replay(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE", help="The trace: a file (also .gz), or - for standard input."
        ),
    ] = None,
    blocks: Annotated[
        str | None,
        _option("--blocks", "One LRU pool of so many blocks: 1000,30000,unlimited.", "N,…"),
    ] = None,
    host: Annotated[
        str, _option("--host", "Sizes of the host tier to try.", "SIZE,…")
    ] = "64GiB,256GiB,1TiB",
    disk: Annotated[
        str, _option("--disk", "Sizes of the disk tier to try, each with each host size.", "SIZE,…")
    ] = "0,4TiB",
    write_policy: Annotated[
        str, _option("--write-policy", "As for serve: through, reused or evict.", "POLICY")
    ] = "through",
    token_bytes: Annotated[
        str, _option("--token-bytes", "KV bytes of one token.", "SIZE")
    ] = "128KiB",
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens a block; default: 512 (Mooncake), 16 (Bailian)."
        ),
    ] = None,
    prefill: Annotated[
        float, typer.Option(min=1, metavar="N", help="Tokens an engine computes in a second.")
    ] = 10_000,
    engines: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Prefills at a time; 0: no request waits for one."),
    ] = 0,
    host_read: Annotated[
        str, _option("--host-read", "Speed from host memory to the engine.", "SIZE/s")
    ] = "20GB/s",
    disk_read: Annotated[
        str, _option("--disk-read", "Speed from disk to host memory.", "SIZE/s")
    ] = "5GB/s",
    disk_write: Annotated[
        str, _option("--disk-write", "Speed from host memory to disk.", "SIZE/s")
    ] = "2GB/s",
    recommend: Annotated[
        str | None,
        _option(
            "--recommend",
            "Name the cheapest size whose mean time to first token is within PART (5%) of the best "
            "size's.",
            "PART",
        ),
    ] = None,
    host_price: Annotated[
        float, typer.Option(min=0, metavar="N", help="Price of a GB of memory.")
    ] = 5.0,
    disk_price: Annotated[
        float, typer.Option(min=0, metavar="N", help="Price of a GB of disk.")
    ] = 0.1,
    plot: Annotated[
        Path | None,
        _option("--plot", "Draw misses, time to first token and writes over size.", "PNG"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N requests.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Take the trace through a daemon of those sizes, too, and compare. Needs one "
            "--host, one --disk, and small ones.",
        ),
    ] = False,
    as_json: JsonOption = False,
    generate: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Only print a synthetic trace of N requests."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the synthetic trace.")] = 0,
) -> int:
    """Replay a trace: what tiers of some size would have done.

    Takes requests through the daemon's own index and eviction rule, on a virtual clock: hit rates by tier, time
    to first token, bytes written to disk. Reads Mooncake's and Bailian's traces, one request at a
    time. No daemon is needed. Knows no quotas, times to live, pins or disk budget.
    """
    if generate is not None:
        return _generate(generate, seed)
    if trace is None:
        raise InvalidRequest("trace", "name a file, or - for standard input")

    from kvstore.config import WritePolicy
    from kvstore.replay import CostModel, Prices, Simulation, open_trace, parse_blocks, parse_grid
    from kvstore.replay import recommend as choose
    from kvstore.replay import replay as run

    if write_policy not in tuple(WritePolicy):
        names = ", ".join(WritePolicy)
        raise InvalidRequest("write-policy", f"{write_policy!r} is none of {names}")
    policy = WritePolicy(write_policy)
    per_token = parse_bytes(token_bytes)
    if per_token < 1:
        raise ConfigError("token-bytes: must be at least 1")
    sizes = parse_grid(host, disk) if blocks is None else parse_blocks(blocks)
    within = None if recommend is None else _part(recommend)
    cost = CostModel(
        prefill=prefill,
        host_read=_rate("host-read", host_read),
        disk_read=_rate("disk-read", disk_read),
        disk_write=_rate("disk-write", disk_write),
        engines=engines,
    )
    if measure and (len(sizes) != 1 or sizes[0].in_blocks):
        raise InvalidRequest("measure", "needs one --host and one --disk, in bytes")
    measured: dict[str, Any] | None = None
    with contextlib.ExitStack() as stack:
        opened = open_trace(trace, token_bytes=per_token, block_tokens=block_tokens)
        stack.callback(opened.close)
        simulations = [Simulation(size, opened.spaces, cost, policy) for size in sizes]
        ticker = stack.enter_context(_ticker())
        requests: Iterator[Request] = itertools.islice(opened, limit)
        if measure:
            size, block = sizes[0], opened.spaces[0]
            daemon = stack.enter_context(_daemon(size.host, size.disk, policy.value, block))
            requests = _taken(requests, daemon)
        results = run(requests, simulations, ticker)
        if measure:
            measured = _compared(results[0].as_json(), daemon.counts())
    prices: Prices = Prices(host_price, disk_price)
    chosen = None if within is None else choose(results, prices, within)
    first, kind = results[0], opened.spaces[0]
    if as_json:
        document: dict[str, Any] = {
            "trace": {
                "name": opened.name,
                "format": opened.format.value,
                "block_tokens": kind.block_tokens,
                "block_bytes": kind.block_bytes,
                "requests": first.requests,
                "blocks": first.blocks,
                "tokens": first.tokens,
                "span_seconds": first.span_seconds,
            },
            "model": _model(cost, policy.value, per_token),
            "sizes": [result.as_json() for result in results],
            "recommendation": None if chosen is None else _recommended(chosen),
            "measured": measured,
        }
        if len(results) == 1:
            document.update(first.as_json())
        print_json(document)
    else:
        span = first.span_seconds
        over = f"{span / 60:,.0f} minutes" if span >= 120 else format_seconds(span)
        print(
            f"{shorten(Path(opened.name).name, 40)} ({opened.format}): {first.requests:,} "
            f"requests over {over},\n{count(first.blocks)} blocks "
            f"of {kind.block_tokens} tokens ({format_bytes(kind.block_bytes)})"
        )
        if opened.dropped:
            print(
                f"{opened.dropped:,} more were not recorded: the daemon was behind, or was killed"
            )
        _print_results(results)
        if chosen is not None:
            _print_recommendation(chosen)
        if measured is not None:
            _print_measured(measured)
    if plot is not None:
        from kvstore.replay.plot import plot as draw

        draw(results, f"{Path(opened.name).name}: {first.requests:,} requests", plot)
    return 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replay")(replay)
