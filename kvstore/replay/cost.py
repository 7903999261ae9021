"""What a request costs: computing its prompt, or loading what is there of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CostModel"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Speeds of the machine that is imagined.

    Attributes:
        prefill: tokens that one engine computes in a second. One number for all lengths: long
            prompts cost more than it says.
        host_read: bytes a second from host memory into the engine.
        disk_read: bytes a second from disk into host memory. One device: loads queue for it.
        disk_write: bytes a second that flushing may write; infinite: at once.
        engines: prefills at the same time; the others wait. 0: as many as needed.
    """

    prefill: float = 10_000.0
    host_read: float = 20e9
    disk_read: float = 5e9
    disk_write: float = 2e9
    engines: int = 0
