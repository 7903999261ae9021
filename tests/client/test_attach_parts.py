"""Leases that grow out of order, slabs that leave under a copy, heartbeats that keep time."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.attach import Held, Lease
from kvstore.attach.prefault import Rest
from kvstore.attach.slabs import SlabTable
from kvstore.attach.upstream import UpStream
from kvstore.attach.usage import UsageLog
from kvstore.errors import AttachmentLost, InvalidRequest
from kvstore.miss import Miss, MissReason
from kvstore.proto import kvstore_pb2 as pb
from kvstore.wire import SlotArray, slot_array

SLOT = 4096


def slots_of(*indexes: int) -> SlotArray:
    return slot_array((1, index, 10 + index) for index in indexes)


def new_lease() -> tuple[Lease, list[Lease]]:
    released: list[Lease] = []
    return Lease(7, b"boot", 3, released.append), released


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_lease_is_the_same_whatever_order_its_parts_arrive_in(order: tuple[int, ...]) -> None:
    lease, _ = new_lease()
    parts = [
        lambda: lease.extend(0, slots_of(0, 1), b"\2\2"),
        lambda: lease.extend(2, slots_of(2), b"\3"),
        lambda: lease.extend(3, slots_of(3, 4), b"\3\3"),
        lambda: lease.finish(5, Miss(MissReason.DEADLINE)),
    ]
    for position, part in enumerate(order):
        assert lease.growing
        assert lease.blocks <= 5
        assert lease.slots["index"].tolist() == list(range(lease.blocks))
        parts[part]()
        assert lease.growing == (position < 3)
    assert lease.slots["index"].tolist() == [0, 1, 2, 3, 4]
    assert lease.slots["generation"].tolist() == [10, 11, 12, 13, 14]
    assert lease.tiers == b"\2\2\3\3\3"
    assert lease.miss.reason is MissReason.DEADLINE
    assert lease.wait(0) == 5


def test_a_part_that_comes_twice_is_taken_once() -> None:
    lease, _ = new_lease()
    lease.extend(0, slots_of(0, 1), b"\2\2")
    lease.extend(0, slots_of(0, 1, 2), b"\2\2\2")
    lease.extend(1, slots_of(1), b"\2")
    assert lease.slots["index"].tolist() == [0, 1, 2]
    assert len(lease.tiers) == 3


def test_waiting_ends_with_growth_loss_or_release() -> None:
    for end in ("grown", "lost", "released", "finished"):
        lease, released = new_lease()
        waiter = threading.Thread(target=lease.wait, args=(30, 0))
        waiter.start()
        match end:
            case "grown":
                lease.extend(0, slots_of(0), b"\2")
            case "lost":
                lease.lose()
            case "released":
                lease.release()
                lease.release()
                assert released == [lease]
            case "finished":
                lease.finish(0, Miss(MissReason.NEVER_SEEN))
        waiter.join(10)
        assert not waiter.is_alive()
        assert lease.lost == (end == "lost")


def test_callbacks_hear_changes_and_late_ones_hear_the_state() -> None:
    lease, _ = new_lease()
    heard: list[int] = []
    lease.on_change(lambda it: heard.append(it.blocks))
    lease.extend(0, slots_of(0), b"\2")
    lease.finish(1, Miss())
    assert heard == [1, 1]
    lease.on_change(lambda it: heard.append(-it.blocks))
    assert heard == [1, 1, -1]
    lease.lose()
    assert heard == [1, 1, -1, 1, -1]


class Slabs:
    """A table with one slab of 8 slots for each of two groups."""

    def __init__(self, directory: Path, rest: Rest | None = None) -> None:
        self.acknowledged: list[int] = []
        self.table = SlabTable(self.acknowledged.extend, rest=rest)
        self.files = {group: directory / f"slab{group}" for group in (1, 2)}
        for group, path in self.files.items():
            data = np.zeros(SLOT * 9, np.uint8)
            data[:64].view(np.uint64)[:] = np.arange(8) + 10
            path.write_bytes(data.tobytes())
            self.table.announce(self.slab(group))

    def slab(self, group: int) -> pb.Slab:
        return pb.Slab(
            group=group,
            tier=pb.TIER_HOST,
            slot_bytes=SLOT,
            slots=8,
            data_offset=SLOT,
            length=SLOT * 9,
            path=str(self.files[group]),
        )

    def mapped(self, group: int) -> bool:
        return str(self.files[group]) in Path("/proc/self/maps").read_text()


@pytest.fixture
def slabs(tmp_path: Path) -> Slabs:
    return Slabs(tmp_path)


def test_copies_and_generations_go_to_the_right_slots(slabs: Slabs) -> None:
    slots = slot_array([(2, 3, 13), (1, 0, 10), (2, 7, 99)])
    with Held(slabs.table, slots) as held:
        for address in held.addresses(0).tolist():
            assert address % SLOT == 0
        first = held.addresses(0)
        np.frombuffer(slabs.table.slab(2, 0).mapping.view(SLOT * 4, 2), np.uint8)[:] = 5
        assert int(first[0]) - int(first[2]) == (3 - 7) * SLOT
        assert held.current(0).tolist() == [True, True, False]
    data = slabs.files[2].read_bytes()
    assert data[SLOT * 4 : SLOT * 4 + 3] == b"\5\5\0"


def test_a_group_is_unmapped_when_its_last_copy_ends_and_only_then_acknowledged(
    slabs: Slabs, until: Callable[..., None]
) -> None:
    first = Held(slabs.table, slots_of(1))
    second = Held(slabs.table, slots_of(2))
    first.addresses(0)
    slabs.table.retire([1, 2])
    # The thread that fills page tables may be at work on either group.
    until(lambda: slabs.acknowledged == [2])
    assert slabs.mapped(1)
    with pytest.raises(AttachmentLost, match="group 1"):
        Held(slabs.table, slots_of(1))
    first.done()
    first.done()
    assert slabs.acknowledged == [2]
    assert second.current(0).tolist() == [True]
    second.done()
    until(lambda: slabs.acknowledged == [2, 1])
    assert not slabs.mapped(1)


def test_an_ended_table_waits_for_copies_without_holding_anybody_up(
    slabs: Slabs, until: Callable[..., None]
) -> None:
    held = Held(slabs.table, slots_of(0))
    address = int(held.addresses(0)[0])
    ended: list[bool] = []
    slabs.table.end("it broke", lambda: ended.append(True))
    assert not ended
    assert slabs.mapped(1)
    assert int(held.addresses(0)[0]) == address
    with pytest.raises(AttachmentLost, match="it broke"):
        Held(slabs.table, slots_of(0))
    held.done()
    until(lambda: ended == [True])
    assert not slabs.mapped(1)
    slabs.table.end("again", lambda: ended.append(True))
    assert ended == [True]


def test_a_slab_announced_a_little_later_is_waited_for(slabs: Slabs, tmp_path: Path) -> None:
    late = slabs.slab(2)
    late.group = 3
    with Held(slabs.table, slot_array([(3, 0, 10)])) as held:
        found: list[int] = []
        asking = threading.Thread(target=lambda: found.extend(held.addresses(0).tolist()))
        asking.start()
        slabs.table.announce(late)
        asking.join(10)
        assert len(found) == 1


def test_what_was_never_announced_is_lost_not_a_crash(slabs: Slabs) -> None:
    with (
        Held(slabs.table, slot_array([(9, 0, 0)])) as held,
        pytest.raises(AttachmentLost, match="group 9"),
    ):
        held.addresses(0)
    with (
        Held(slabs.table, slot_array([(1, 8, 0)])) as held,
        pytest.raises(AttachmentLost, match="no slot 8"),
    ):
        held.addresses(0)


def test_a_truncated_slab_is_refused_before_it_kills_the_process(slabs: Slabs) -> None:
    os.truncate(slabs.files[1], SLOT * 8)
    table = SlabTable(lambda _groups: None)
    table.announce(slabs.slab(1))
    with (
        Held(table, slots_of(0)) as held,
        pytest.raises(AttachmentLost, match="shorter"),
    ):
        held.addresses(0)


def filled(slabs: Slabs, group: int) -> bool:
    """Whether this process's page tables have every page of a slab."""
    _, _, after = Path("/proc/self/smaps").read_text().partition(str(slabs.files[group]))
    sizes = dict(line.split(":", 1) for line in after.splitlines()[1:23] if ":" in line)
    return bool(sizes) and sizes["Rss"].strip() == sizes["Size"].strip()


def test_page_tables_are_filled_once_nobody_computes(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    rest = Rest()
    rest.set(True)
    slabs = Slabs(tmp_path, rest)
    # A copy needs one of the slabs all the same.
    with Held(slabs.table, slots_of(0)) as held:
        held.addresses(0)
        assert not filled(slabs, 1)
        # Nothing is held by the thread that would fill them.
        slabs.table.retire([2])
        until(lambda: slabs.acknowledged == [2])
        rest.set(False)
        until(lambda: filled(slabs, 1))


def test_a_table_that_ends_leaves_no_thread_that_rests(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    rest = Rest()
    rest.set(True)
    before = set(threading.enumerate())
    slabs = Slabs(tmp_path, rest)
    assert [t.name for t in threading.enumerate() if t not in before] == ["kvstore-prefault"]
    slabs.table.end("over", lambda: None)
    until(lambda: not [t for t in threading.enumerate() if t not in before])


def test_heartbeats_come_between_messages_and_end_with_the_stream() -> None:
    beats = itertools.count()
    up = UpStream(lambda: pb.Heartbeat(usage=[pb.Usage(requests=next(beats))]))
    up.send(pb.AttachUp(open=pb.AttachOpen(client="c")))
    assert next(up).open.client == "c"
    up.start_beating(0.001)
    assert next(up).WhichOneof("event") == "heartbeat"
    up.send(pb.AttachUp(locked=pb.AttachLocked()))
    assert {next(up).WhichOneof("event") for _ in range(4)} == {"locked", "heartbeat"}
    up.send(pb.AttachUp(detach=pb.Detach()))
    up.end()
    rest = [message.WhichOneof("event") for message in up]
    assert rest[-1] == "detach"


def test_usage_is_added_up_and_taken_once() -> None:
    log = UsageLog()
    space = pb.SpaceRef(id=b"s", epoch=1)
    log.add(space, requests=1, prompt_tokens=5)
    log.add(space, requests=2, reused_tokens_disk=3)
    (usage,) = log.take()
    assert (usage.requests, usage.prompt_tokens, usage.reused_tokens_disk) == (3, 5, 3)
    assert log.take() == []
    with pytest.raises(InvalidRequest, match="^requests: "):
        log.add(space, prompt_tokens=1, requests=-1)
    with pytest.raises(InvalidRequest, match="^tokens: "):
        log.add(space, requests=1, tokens=1)
    assert log.take() == []
