"""Frames from fixed answers: what they say, and that they fit."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.cli.plain import plain
from kvstore.cli.top.frame import frame, to_ascii
from kvstore.cli.top.history import History
from kvstore.cli.top.view import PREFIX_SORTS, SORTS, View
from kvstore.proto import kvstore_pb2 as pb


def space(number: int, model: str, *, blocks: int, prompt: int, reused: int) -> pb.SpaceInfo:
    return pb.SpaceInfo(
        space=pb.SpaceRef(id=bytes([number]) * 16, epoch=1),
        spec=pb.SpaceSpec(model=model, shard_bytes=[65536]),
        blocks=blocks,
        blocks_host=blocks // 2,
        blocks_disk=blocks,
        pinned=number,
        usage=pb.Usage(prompt_tokens=prompt, reused_tokens_host=reused),
    )


def prefix(number: int, key: str, *, requests: int, blocks: int, shared: int) -> pb.HotPrefix:
    return pb.HotPrefix(
        space_id=bytes([number]) * 16,
        root=bytes.fromhex(key) * 16,
        key=bytes.fromhex(key)[::-1] * 16,
        requests=requests,
        hit_blocks=blocks,
        hit_tokens=blocks * 128,
        shared_blocks=shared,
        shared_tokens=shared * 128,
        shared_bytes=shared * 65536,
        blocks_host=shared,
        blocks_disk=shared // 2,
    )


def answer(uptime: float, step: int, *, boot: bytes = b"\xab" * 16, gpu: bool = False) -> Any:
    """A daemon's answer; `step` counts what happened since its start."""
    tiers = [
        pb.TierStats(
            tier=pb.TIER_HOST,
            capacity_bytes=8 << 30,
            used_bytes=6 << 30,
            blocks=1000,
            hit_blocks=600 * step,
            evicted_blocks=40 * step,
            dirty_blocks=7,
            state="ok",
        ),
        pb.TierStats(
            tier=pb.TIER_DISK,
            capacity_bytes=100 << 30,
            used_bytes=98 << 30,
            blocks=20_000,
            hit_blocks=200 * step,
            read_bytes=(10 << 20) * step,
            written_bytes=(30 << 20) * step,
            io_errors=3,
            state="degraded: no space left on device",
        ),
    ]
    if gpu:
        tiers.insert(0, pb.TierStats(tier=pb.TIER_GPU, capacity_bytes=1 << 30, state="ok"))
    return plain(
        pb.StatsResponse(
            boot_id=boot,
            server_version="0.1.0",
            uptime_seconds=uptime,
            tiers=tiers,
            spaces=[
                space(1, "zebra", blocks=10, prompt=100 * step, reused=90 * step),
                space(2, "a/long/path/to/some/model/horse", blocks=500, prompt=900, reused=0),
                space(3, "evil\x1b[2Jname\n", blocks=400, prompt=0, reused=0),
                space(4, "長い名前" * 20, blocks=3, prompt=0, reused=0),
            ],
            clients=[pb.ClientStats(client="x", pid=1, state="active")],
            counters={"evictions_background": 30, "evictions_inline": 10, "spaces": 4},
            misses_blocks={"evicted": 150 * step, "never_seen": 50 * step},
            misses_tokens={"evicted": 2400 * step, "never_seen": 800 * step},
            timings=[
                pb.Timing(name="acquire", count=9, p50_seconds=2e-4, p99_seconds=3e-4),
                pb.Timing(name="flush_group", count=9, p50_seconds=0.01, p99_seconds=0.0844),
                pb.Timing(name="wait_predicted", count=9, p99_seconds=99),
            ],
            usage=pb.Usage(
                prompt_tokens=1000 * step,
                reused_tokens_host=400 * step,
                reused_tokens_disk=100 * step,
                local_tokens=250 * step,
                loaded_bytes=(20 << 20) * step,
                stored_bytes=(5 << 20) * step,
            ),
            leases=3,
            grants=1,
            granted_slots=40,
            stuck_slots=2,
            stuck_bytes=2 << 20,
            prefixes=[
                prefix(1, "aa", requests=100 + 30 * step, blocks=200, shared=5),
                prefix(2, "bb", requests=50 * step, blocks=900, shared=40),
                prefix(1, "cc", requests=300, blocks=300, shared=512),
            ],
        )
    )


def history(*answers: Any) -> History:
    kept = History()
    for one in answers:
        kept.add(one)
    return kept


def text(kept: History, view: View | None = None, height: int = 24) -> list[str]:
    return [line.plain for line in frame(kept, view or View(), 80, height)]


def test_a_frame_says_what_the_answers_say() -> None:
    lines = text(history(answer(10, 1), answer(12, 3)))
    shown = {line.split()[0]: " ".join(line.split()) for line in lines if line.strip()}
    assert shown["kvstore"] in (
        "kvstore 0.1.0 boot abababab up 12 s every 1 s",
        "kvstore 50.0%, engines' own caches 25.0% since start; failed loads 0",
    )
    assert shown["effective,"] == "effective, of prompt tokens 75.0% 75.0% of 3,000 tokens"
    assert shown["blocks"] == "blocks found, of those asked for 80.0% 80.0% of 3,000 blocks"
    # 600 a step, two steps in two seconds.
    assert shown["host"].endswith("75% 6 GiB 8 GiB 1,000 600 40 ok")
    assert "98 GiB  100 GiB  20,000     200       0  degraded" in "\n".join(lines)
    assert "  disk: degraded: no space left on device" in lines
    assert "  disk: 3 I/O errors" in lines
    assert shown["THROUGHPUT"] == "THROUGHPUT load 20 MiB/s store 5 MiB/s disk read 10 MiB/s"
    assert any(line.split() == ["disk", "write", "30", "MiB/s"] for line in lines)
    assert shown["QUEUE"] == (
        "QUEUE to disk 7 leases 3 grants 1 (40 slots) clients 1 stuck 2 (2 MiB)"
    )
    assert shown["EVICTED"] == "EVICTED host in background 30, a writer waiting 10, by request 0"
    assert shown["evicted"].startswith("evicted 150 450 flush group 10 ms 84.4 ms")
    assert shown["never"].startswith("never seen 50.0 150 acquire") or shown["never"].startswith(
        "never seen 50 150 acquire"
    )
    assert "wait predicted" not in "\n".join(lines)
    assert lines[-1].startswith("q quit  p pause  s sort: blocks")


def test_a_budget_that_is_nearly_spent_is_mentioned() -> None:
    stats = answer(10, 1)
    disk = stats["tiers"][1]
    for left, told in ((600 << 20, False), (10 << 20, True), (0, True)):
        disk.update(budget_bytes=10 << 30, budget_left_bytes=left)
        shown = "left of what may be written in 24 hours" in "\n".join(text(history(stats)))
        assert shown is told


def test_hit_rate_now_is_that_of_the_last_seconds() -> None:
    first, second = answer(10, 1), answer(12, 3)
    # In between: 1,000 prompt tokens, none of them reused.
    second["usage"] = first["usage"] | {"prompt_tokens": 2000}
    (line,) = (line for line in text(history(first, second)) if line.startswith("effective"))
    assert line.split()[4:6] == ["0.0%", "37.5%"]


def test_one_answer_has_no_rates() -> None:
    lines = text(history(answer(10, 1)))
    (host,) = (line for line in lines if line.startswith("host"))
    assert host.split()[-3:] == ["-", "-", "ok"]


def test_another_run_of_the_daemon_begins_anew() -> None:
    kept = history(answer(10, 5), answer(1, 0, boot=b"\xcd" * 16))
    assert kept.seconds == 0
    kept.add(answer(2, 1, boot=b"\xcd" * 16))
    assert kept.tier_change("host", "hit_blocks") == 600


def test_the_window_slides() -> None:
    kept = history(*(answer(float(second), second) for second in range(20)))
    assert kept.before["uptime_seconds"] == 14
    # Looks further apart than the window: the last two count.
    kept = history(*(answer(float(second), second) for second in (0, 60, 120)))
    assert kept.seconds == 60


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (132, 60), (40, 10), (20, 3)])
def test_no_frame_is_wider_or_higher_than_the_terminal(width: int, height: int, gpu: bool) -> None:
    busy = answer(1e7, 10**9, gpu=gpu)
    for tier in busy["tiers"]:
        tier.update(capacity_bytes=10**13, used_bytes=10**13, blocks=5_000_000)
    for info in busy["spaces"]:
        info.update(blocks=10**9, blocks_host=10**8, blocks_disk=10**9, pinned=10**7)
    kept = history(answer(1e7 - 2, 1, gpu=gpu), busy)
    lines = frame(kept, View(paused=True, reverse=True), width, height)
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width
    assert all(character.isprintable() for line in lines for character in line.plain)
    assert lines[0].plain.endswith("PAUSED") or width < 80
    for line in map(to_ascii, lines):
        assert line.plain.isascii()
        assert line.cell_len <= width


def test_numbers_of_a_busy_server_are_not_cut_at_eighty_columns() -> None:
    """Cut lines end in an ellipsis: only the notes of a degraded tier may."""
    busy = answer(1e7, 10**6)
    busy["spaces"] = busy["spaces"][:1]
    for tier in busy["tiers"]:
        tier.update(capacity_bytes=10**13, used_bytes=10**13, blocks=5_000_000)
    lines = text(history(answer(1e7 - 5, 1), busy), height=40)
    assert [line for line in lines if line.endswith("…")] == []


def test_spaces_sorted_by_what_the_viewer_chose() -> None:
    kept = history(answer(10, 1), answer(12, 3))
    first: dict[str, str] = {}
    for order in SORTS:
        lines = text(kept, View(sort=order), height=40)
        heading = next(i for i, line in enumerate(lines) if line.startswith("SPACES (4)"))
        first[order] = lines[heading + 1][:4]
    assert first == {
        "tokens/s": "0101",
        "blocks": "0202",
        "hit rate": "0101",
        "pinned": "0404",
        "model": "0202",
    }
    lines = text(kept, View(sort="blocks", reverse=True), height=40)
    heading = next(i for i, line in enumerate(lines) if line.startswith("SPACES"))
    assert lines[heading + 1].startswith("0404 …")


def test_prefixes_sorted_by_what_the_viewer_chose() -> None:
    kept = history(answer(10, 1), answer(12, 3))
    first: dict[str, str] = {}
    for order in PREFIX_SORTS:
        lines = text(kept, View(prefixes=True, prefix_sort=order))
        heading = next(i for i, line in enumerate(lines) if line.startswith("PREFIXES"))
        first[order] = lines[heading + 1][5:7]
    assert first == {
        "hot": "aa",
        "requests/s": "bb",
        "requests": "cc",
        "hit tokens": "bb",
        "shared": "cc",
    }
    lines = text(kept, View(prefixes=True))
    (row,) = (line for line in lines if line.startswith("0101 aa"))
    assert row.split() == [
        "0101",
        "aa" * 6,
        "640",
        "320",
        "KiB",
        *["0", "5", "2", "190", "30", "25,600"],
    ]
    # A low terminal shows the list that was chosen, a high one both, the chosen one first.
    assert not any(line.startswith("SPACES") for line in lines)
    assert not any(line.startswith("PREFIXES") for line in text(kept))
    for view, titles in (
        (View(), ["SPACES", "PREFIXES"]),
        (View(prefixes=True), ["PREFIXES", "SPACES"]),
    ):
        firsts = [line.split(" ")[0].rstrip(",") for line in text(kept, view, height=40)]
        assert [word for word in firsts if word in titles] == titles


def test_a_prefix_that_came_back_counts_anew() -> None:
    first, second = answer(10, 3), answer(12, 1)
    assert history(first, second).prefix_changes()["01" * 16, "aa" * 16] == 130
    second["prefixes"] = second["prefixes"][1:]
    assert set(history(first, second).prefix_changes().values()) == {50, 0}


def test_keys() -> None:
    view = View()
    view.press("s")
    assert view.sort == "hit rate"
    view.press("sssss")
    assert view.sort == "hit rate"
    view.press("pr+")
    assert (view.paused, view.reverse, view.interval_s, view.done) == (True, True, 0.5, False)
    view.press("+++++++++")
    assert view.interval_s == 0.1
    view.press(" xyz")
    assert not view.paused
    view.press("vss")
    assert (view.prefixes, view.order, view.sort) == (True, "requests", "hit rate")
    view.press("v")
    assert (view.prefixes, view.order) == (False, "hit rate")
    view.press("q")
    assert view.done


def test_a_space_that_has_what_its_quota_allows_is_marked() -> None:
    limited = answer(12, 3)
    info = limited["spaces"][0]
    info["limits"] = info["limits"] | {"host_bytes": 10 * 65536, "disk_bytes": 100 * 65536}
    info |= {"bytes_host": 10 * 65536, "bytes_disk": 90 * 65536, "blocks_host": 10}
    lines = frame(history(answer(10, 1), limited), View(), 80, 40)
    marked = [
        line.plain[span.start : span.end].strip()
        for line in lines
        for span in line.spans
        if span.style == "yellow"
    ]
    assert marked == ["10"]
