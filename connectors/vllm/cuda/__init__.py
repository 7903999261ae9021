"""Copies between a KV cache in GPU memory and slots. Imported only where the KV cache is on CUDA.

What runs where:

- The engine's thread *submits*: it works out addresses (numpy), uploads one table per copy, and
  queues copies, kernels and waits on streams of our own (`pipe`). It waits for nothing,
  not for the daemon's announcement of a slab, nor for its being mapped either.
- The GPU orders everything: a store waits for an event of the compute stream recorded when it was
  submitted; a load likewise, because blocks that were handed out may still be written by a step in
  flight. When blocks that a store still reads are handed out, the compute stream waits for the
  store's event, and with it every load submitted afterwards.
- A thread per direction waits for the copies' last events, compares generations, calls back.
- Slabs are pinned in the background (`pins`); an engine that starts waits for that before it serves.
  What is not pinned goes through a pinned bounce buffer, on a thread per direction (`pipe.Bounce`),
  because that takes copies by the CPU. A store that is still in it when its blocks are handed out is
  given up between two chunks: the engine waits for that, not for the rest, and for nothing where the
  store has not begun.
- A load of a daemon run that this process has not found yet, or from a slab that it has not mapped,
  waits for that on a thread. A store to such a slab waits on the bounce buffer's thread, and is
  given up like any other there.

Which way bytes go (`routes`):

====================================  ==========================================================
slot in the daemon's device memory    one kernel, slot to KV cache
block in one large piece              batched DMA between slot and KV cache
block in many pieces, or small        a kernel gathers or scatters through a ring of staging
                                      buffers on the GPU, with DMA of whole slots behind it, of
                                      several where they are neighbours
slots small and far apart             one kernel, straight between KV cache and pinned memory
not pinned                            the ring, with DMA to and from the bounce buffer
====================================  ==========================================================

What a failure leaves: a copy that cannot be submitted or ends in an error is waited for, then
reported as failed; slots stay mapped and granted until nothing touches them any more.
"""

from __future__ import annotations

from kvstore.connectors.vllm.cuda.copier import CudaCopier
from kvstore.connectors.vllm.cuda.factory import make_copier

__all__ = ["CudaCopier", "make_copier"]
