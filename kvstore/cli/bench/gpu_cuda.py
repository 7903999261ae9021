"""What `bench gpu` measures with on a CUDA device: the connector's own copier."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvstore.cli.bench.gpu_machine import CudaMachine
from kvstore.cli.bench.gpu_moves import Copier
from kvstore.cli.bench.gpu_run import Kit
from kvstore.cli.connect import connect
from kvstore.client import Client

__all__ = ["cuda_kit"]


def cuda_kit(device: int) -> Kit:
    """Take a device into use.

    Raises:
        ChildError: there is none.
    """
    machine = CudaMachine(device)
    # After the device is known to be there: everything below needs one.
    from kvstore.attach.mapped import PAGEABLE
    from kvstore.connectors.vllm.cuda import make_copier

    def copier_of(geometry: Any, attachment: Any, group_blocks: int, tensor: Any) -> Copier:
        copier, _, _ = make_copier(geometry, attachment, 0, group_blocks, tensor)
        return copier

    @contextlib.contextmanager
    def client_of(address: str) -> Iterator[Client]:
        with connect(address) as client:
            client.attachment.use_devices([machine.uuid])
            yield client

    def pinned(held: Any) -> bool:
        return PAGEABLE not in held.places(0)[1]

    return Kit(machine, client_of, copier_of, pinned)
