"""Makes the copier for the GPU that a KV cache is on."""

from __future__ import annotations

from typing import Any, Final

from kvstore.connectors.vllm.cuda.copier import MOST_CHUNK_BYTES, CudaCopier
from kvstore.connectors.vllm.cuda.pins import SlabPins
from kvstore.connectors.vllm.geometry import Geometry
from kvstore.connectors.vllm.store import Attachment

__all__ = ["make_copier"]

# A buffer of a ring is small beside the GPU's memory.
_LEAST_CHUNK_BYTES: Final = 8 << 20
_CHUNK_SHARE: Final = 2048


def make_copier(
    geometry: Geometry, attachment: Attachment, shard: int, group_blocks: int, tensor: Any
) -> tuple[CudaCopier, str, SlabPins]:
    """Make the copier for a KV cache, and have this rank's slabs pinned from now on.

    Args:
        geometry: of the KV cache.
        attachment: that maps the slots.
        shard: that this rank holds.
        group_blocks: engine blocks per slot.
        tensor: of the KV cache.

    Returns:
        The copier, the UUID of its device, and who pins slabs for that.

    Raises:
        CudaError: there is no usable CUDA runtime, or no memory.
    """
    import torch

    from kvstore.connectors.vllm.cuda import kernels
    from kvstore.connectors.vllm.cuda.units import cut
    from kvstore.cudart import Cudart, cudart

    class Torch(Cudart):
        """The runtime, and PyTorch's idea of the current stream."""

        def compute_stream(self) -> int:
            return int(torch.cuda.current_stream(number).cuda_stream)

    number = int(tensor.device.index or 0)
    runtime = cudart()
    device = Torch(runtime.library)
    units = cut(geometry)
    pins = SlabPins(device, number)
    with device.on_device(number):
        uuid = device.device_uuid(number)
        _, memory = device.memory()
        chunk_bytes = max(_LEAST_CHUNK_BYTES, min(MOST_CHUNK_BYTES, memory // _CHUNK_SHARE))
        properties = torch.cuda.get_device_properties(number)
        copier = CudaCopier(
            device,
            lambda rows: kernels.Mover(units, tensor.device, rows),
            geometry,
            attachment,
            shard,
            group_blocks,
            device_number=number,
            multiprocessors=int(properties.multi_processor_count),
            serving=pins.serving,
            chunk_bytes=chunk_bytes,
        )
    attachment.use_devices([uuid], pins)
    return copier, uuid, pins
