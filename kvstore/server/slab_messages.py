"""Slab groups of either tier as the announcements that an attachment gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb
from kvstore.tiers.gpu_slab import GpuSlabGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.engine.attachments import Attachment
    from kvstore.tiers.slab import SlabGroup

__all__ = ["slab_messages"]


def slab_messages(
    attachment: Attachment, group: SlabGroup | GpuSlabGroup
) -> Iterator[pb.AttachDown]:
    """Yield one message per slab that the attachment copies from or to."""
    if isinstance(group, GpuSlabGroup):
        yield from _gpu_slabs(attachment, group)
        return
    for slab in group.slabs:
        if attachment.shards and slab.shard not in attachment.shards:
            continue
        yield pb.AttachDown(
            slab=pb.Slab(
                group=group.group,
                shard=slab.shard,
                tier=pb.TIER_HOST,
                slot_bytes=slab.slot_bytes,
                slots=slab.slots,
                data_offset=slab.data_offset,
                length=slab.length,
                path=str(slab.path),
            )
        )


def _gpu_slabs(attachment: Attachment, group: GpuSlabGroup) -> Iterator[pb.AttachDown]:
    for slab in group.slabs:
        if attachment.shards and slab.shard not in attachment.shards:
            continue
        if slab.device_uuid not in attachment.devices:
            continue
        yield pb.AttachDown(
            slab=pb.Slab(
                group=group.group,
                shard=slab.shard,
                tier=pb.TIER_GPU,
                slot_bytes=slab.slot_bytes,
                slots=slab.slots,
                data_offset=0,
                length=slab.length,
                cuda=pb.CudaIpc(
                    handle=slab.handle,
                    device_uuid=slab.device_uuid,
                    offset=slab.offset,
                    generations_path=str(group.generations_path),
                    allocation_bytes=slab.allocation_bytes,
                ),
            )
        )
