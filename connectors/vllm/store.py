"""What the connector needs from a kvstore client.

Nothing here blocks unless its name says wait, except `Client.open_space`, which the connector
calls on a thread of its own. Methods raise `KVStoreError`; futures carry it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.keys import Keys
    from kvstore.miss import Miss
    from kvstore.space import SpaceSpec

__all__ = ["Attachment", "Client", "Factory", "Grant", "Held", "Lease", "Space", "load_factory"]

# Packed slots as arrays: uint32 group, uint32 index, uint64 generation.
SlotArray = NDArray[Any]


class Lease(Protocol):
    """The right to read a leading run of blocks. It may grow while `growing`."""

    @property
    def id(self) -> int:
        """Chosen by the client."""

    @property
    def blocks(self) -> int:
        """Blocks leased now."""

    @property
    def slots(self) -> SlotArray:
        """Where they lie, shape (blocks,)."""

    @property
    def tiers(self) -> bytes:
        """One byte a block: the tier that held it when asked (1 gpu, 2 host, 3 disk)."""

    @property
    def growing(self) -> bool:
        """Whether more blocks may come."""

    @property
    def miss(self) -> Miss:
        """Why the run ended; says nothing while it grows."""

    @property
    def present(self) -> int:
        """Leading keys whose blocks were in any tier when asked; at least those leased then."""

    @property
    def lost(self) -> bool:
        """Whether the daemon took it back."""

    @property
    def boot_id(self) -> bytes:
        """Daemon run that gave it."""

    def release(self) -> None:
        """End it. Idempotent."""


class Grant(Protocol):
    """The right to fill some empty slots."""

    @property
    def id(self) -> int:
        """Chosen by the client."""

    @property
    def owner_id(self) -> int:
        """Attachment that reserved."""

    @property
    def boot_id(self) -> bytes:
        """Daemon run that gave it."""

    @property
    def slots(self) -> SlotArray:
        """Shape (granted,), fewer than asked for when the pool is short."""

    @property
    def shortage(self) -> int:
        """Why fewer; 0 when all."""


class Space(Protocol):
    """An open space, bound to its epoch."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, its shards together."""

    def acquire(
        self,
        keys: Keys,
        *,
        deadline_s: float = 0.0,
        prefill_tokens_per_second: float | None = 0.0,
        priority: int = 0,
        request_id: str = "",
        queued_s: float = 0.0,
    ) -> Future[Any]:
        """Lease the leading run that is in memory; promote what follows until the deadline.

        For `queued_s` seconds waiting costs nothing.
        """

    def reserve(
        self,
        count: int,
        *,
        writers: Sequence[int] = (),
        deadline_s: float = 0.0,
        protect: Keys | Sequence[bytes] = (),
    ) -> Future[Any]:
        """Ask for empty slots that the attachments `writers`, one per shard, will fill."""


class Held(Protocol):
    """Slots whose memory stays mapped."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(self, *what: object) -> None:
        """Let go."""

    def mapped(self, shard: int) -> bool:
        """Return, at once, whether nothing here waits for memory to be mapped."""

    def map(self, shard: int, timeout_s: float) -> None:
        """Map what is not yet; wait so long for the daemon to announce it."""

    def addresses(self, shard: int) -> NDArray[np.uint64]:
        """Addresses of the slots' bytes in this process."""

    def places(self, shard: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return the addresses, and how a GPU gets at each (`kvstore.attach.mapped`)."""

    def stretches(self, shard: int) -> NDArray[np.int64]:
        """Return a number for each slot; a GPU's copy may cross from a slot to one of the same."""

    def done(self) -> None:
        """Let go, from any thread."""

    def current(self, shard: int) -> NDArray[np.bool_]:
        """Whether each slot's generation is still the one named. Check after copying."""


class Attachment(Protocol):
    """This process's mapping of the pool. It re-attaches by itself, under another id."""

    @property
    def id(self) -> int:
        """0 while not attached."""

    @property
    def alive(self) -> bool:
        """Whether the daemon that gave `id` still answers."""

    @property
    def boot_id(self) -> bytes:
        """Of the daemon run attached to; empty while not attached."""

    def use_devices(self, uuids: Sequence[str], pins: Any = None) -> None:
        """Say whose device memory leases may name; have slabs pinned by `pins`."""

    @property
    def opens_devices(self) -> bool:
        """Whether the daemon's device memory can be opened, as far as it is known."""

    @property
    def unfilled(self) -> int:
        """How often memory could not be faulted in ahead, under this attachment."""

    def rest(self, resting: bool) -> None:
        """Let background work on mapped memory wait, or go on."""

    def wait_active(self, timeout_s: float) -> bool:
        """Wait until attached; return whether it is."""

    def wait_filled(self, timeout_s: float, groups: Collection[int] = ()) -> bool:
        """Wait until these groups are announced and all that are pinned; return whether they are."""

    def make_room(self, shard_bytes: Sequence[int]) -> Future[Any]:
        """Have memory made for such blocks: `made_bytes`, `expected_bytes`, `groups` so far."""

    @property
    def streams_only(self) -> bool:
        """Whether it is known that the pool cannot be mapped from this process."""

    def wait_run(self, boot_id: bytes, timeout_s: float) -> bool:
        """Wait until attached to this daemon run; return whether it is. False at once if over."""

    def using(self, slots: SlotArray, *, boot_id: bytes, writer_id: int = 0) -> Held:
        """Return a context manager (`Held`) that keeps the slots mapped for a copy.

        Args:
            slots: which.
            boot_id: daemon run that granted them.
            writer_id: for writing: the attachment that the grant names.

        Raises:
            AttachmentLost: they are of another run or another attachment.
        """

    def commit(
        self,
        space: Any,
        owner_id: int,
        grant_id: int,
        shard: int | None,
        slots: SlotArray,
        keys: Keys,
        parents: bytes,
    ) -> Future[bytes]:
        """Say that a shard of some slots is written; one `CommitOutcome` byte a slot."""

    def abort(
        self,
        owner_id: int,
        grant_id: int,
        slots: SlotArray | None = None,
        all_shards: bool = False,
    ) -> Any:
        """Give slots back unused."""


class Client(Protocol):
    """A connection that comes and goes with the daemon; this object stays."""

    @property
    def attachment(self) -> Attachment:
        """This process's attachment."""

    def open_space(self, spec: SpaceSpec) -> Any:
        """Open a space. Blocks for one call to the daemon."""

    def report_usage(
        self,
        space: Any,
        *,
        requests: int = 0,
        prompt_tokens: int = 0,
        reused_tokens_gpu: int = 0,
        reused_tokens_host: int = 0,
        reused_tokens_disk: int = 0,
        local_tokens: int = 0,
        load_failures: int = 0,
        loaded_bytes: int = 0,
        stored_bytes: int = 0,
    ) -> None:
        """Count what became of requests; sent with the next heartbeat."""

    def report_time(self, operation: str, seconds: float) -> None:
        """Count how long a lookup, load or store took; sent with the next heartbeat."""

    def close(self) -> None:
        """Detach and disconnect."""


Factory = Callable[..., Client]


def load_factory(path: str) -> Factory:
    """Return the callable that `path` (`module:name`) names; the default client for "".

    Raises:
        ConfigError: it cannot be imported.
    """
    module_name, _, name = (path or "kvstore.client:Client").partition(":")
    try:
        factory: Factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"store_factory {path!r} cannot be imported: {error}") from error
    return factory
