"""Messages ↔ values, errors ↔ gRPC status: the one place where both sides agree on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from kvstore import errors
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.keys import Keys
from kvstore.miss import Miss, MissReason
from kvstore.outcomes import CommitOutcome, Shortage
from kvstore.proto import kvstore_pb2 as pb
from kvstore.space import SpaceSpec

__all__ = [
    "ALL_SHARDS",
    "CHUNK_BYTES",
    "ERRORS",
    "MAX_KEYS",
    "MAX_MESSAGE_BYTES",
    "NO_LIMIT",
    "PROTOCOL_VERSION",
    "SLOT_DTYPE",
    "SLOT_NAME_DTYPE",
    "TIERS",
    "CommitOutcome",
    "Shortage",
    "SlotArray",
    "channel_options",
    "error_from_rpc",
    "miss_from_message",
    "miss_to_message",
    "pack_chain_parents",
    "pack_parents",
    "pack_run_parent",
    "pack_slot_names",
    "pack_slots",
    "server_options",
    "slot_array",
    "spec_from_message",
    "spec_to_message",
    "status_of",
    "tier_name",
    "tier_value",
    "unpack_keys",
    "unpack_parents",
    "unpack_slot_names",
    "unpack_slots",
]

# Don't forget to bump when a message changes its meaning; Hello refuses other versions.
PROTOCOL_VERSION: Final = 1

MAX_MESSAGE_BYTES: Final = 4 << 20

# Largest `data` of a Chunk.
CHUNK_BYTES: Final = 1 << 20

# Keys per message. The widest record is a Commit item: 8 + 32 + 32 bytes, so 2.3 MiB.
MAX_KEYS: Final = 32_768

# CommitRequest.shard: every shard that the attachment writes.
ALL_SHARDS: Final = 0xFFFFFFFF

# A value of Limits: there is none, whatever the daemon's default.
NO_LIMIT: Final = (1 << 64) - 1

SLOT_DTYPE: Final = np.dtype([("group", "<u4"), ("index", "<u4"), ("generation", "<u8")])
SLOT_NAME_DTYPE: Final = np.dtype([("group", "<u4"), ("index", "<u4")])
SlotArray = npt.NDArray[np.void]

_ERROR_KEY: Final = "kvstore-error"
_ERRNO_KEY: Final = "kvstore-errno"

TIERS: Final = {"gpu": pb.TIER_GPU, "host": pb.TIER_HOST, "disk": pb.TIER_DISK}
_TIER_NAMES: Final = {int(value): name for name, value in TIERS.items()}


def tier_value(name: str | None) -> pb.Tier:
    """Return the wire's value of a tier's name; None or empty is TIER_UNSPECIFIED.

    Raises:
        InvalidRequest: no such tier.
    """
    if not name:
        return pb.TIER_UNSPECIFIED
    if name not in TIERS:
        raise InvalidRequest("tier", f"{name!r} is not one of {', '.join(TIERS)}")
    return TIERS[name]


def tier_name(value: int) -> str:
    """Return a tier's name, or an empty string for TIER_UNSPECIFIED and unknown values."""
    return _TIER_NAMES.get(value, "")


def spec_to_message(spec: SpaceSpec) -> pb.SpaceSpec:
    """Return the message of a spec."""
    return pb.SpaceSpec(
        model=spec.model,
        weights_version=spec.weights_version,
        dtype=spec.dtype,
        block_tokens=spec.block_tokens,
        shard_bytes=spec.shard_bytes,
        tensor_parallel=spec.tensor_parallel,
        pipeline_parallel=spec.pipeline_parallel,
        pipeline_rank=spec.pipeline_rank,
        context_parallel=spec.context_parallel,
        layout=spec.layout,
        kv_group=spec.kv_group,
        hash_algorithm=spec.hash_algorithm,
        root_seed=spec.root_seed,
        tenant=spec.tenant,
        key_bytes=spec.key_bytes,
    )


def spec_from_message(message: pb.SpaceSpec) -> SpaceSpec:
    """Return the spec that a message means, with the wire's defaults filled in.

    Raises:
        InvalidRequest: naming the field that is wrong.
    """
    return SpaceSpec(
        model=message.model,
        weights_version=message.weights_version,
        dtype=message.dtype,
        block_tokens=message.block_tokens,
        shard_bytes=tuple(message.shard_bytes),
        tensor_parallel=message.tensor_parallel or 1,
        pipeline_parallel=message.pipeline_parallel or 1,
        pipeline_rank=message.pipeline_rank,
        context_parallel=message.context_parallel or 1,
        layout=message.layout or "opaque",
        kv_group=message.kv_group,
        hash_algorithm=message.hash_algorithm or "xxh3-128",
        root_seed=message.root_seed,
        tenant=message.tenant,
        key_bytes=message.key_bytes,
    )


def slot_array(slots: Iterable[tuple[int, int, int]]) -> SlotArray:
    """Return (group, index, generation) triples as one array of SLOT_DTYPE."""
    return np.array([tuple(slot) for slot in slots], SLOT_DTYPE)


def pack_slots(slots: SlotArray) -> bytes:
    """Return the 16-byte records of slots, an array of SLOT_DTYPE with shape (n,)."""
    return slots.astype(SLOT_DTYPE, copy=False).tobytes()


def unpack_slots(packed: bytes) -> SlotArray:
    """Return packed 16-byte records as a read-only array of SLOT_DTYPE with shape (n,).

    Raises:
        InvalidRequest: not a whole number of records.
    """
    return _unpack("slots", packed, SLOT_DTYPE)


def pack_slot_names(slots: SlotArray) -> bytes:
    """Return the 8-byte names (group, index) of slots of either dtype."""
    names = np.empty(len(slots), SLOT_NAME_DTYPE)
    names["group"] = slots["group"]
    names["index"] = slots["index"]
    return names.tobytes()


def unpack_slot_names(packed: bytes) -> SlotArray:
    """Return packed 8-byte names as a read-only array of SLOT_NAME_DTYPE with shape (n,).

    Raises:
        InvalidRequest: not a whole number of names.
    """
    return _unpack("slots", packed, SLOT_NAME_DTYPE)


def _unpack(field: str, packed: bytes, dtype: np.dtype[Any]) -> SlotArray:
    if len(packed) % dtype.itemsize:
        raise InvalidRequest(
            field, f"{len(packed)} bytes are not a whole number of {dtype.itemsize}-byte records"
        )
    return np.frombuffer(packed, dtype)


def unpack_keys(packed: bytes, key_bytes: int, parent: bytes = b"") -> Keys:
    """Return packed keys of a request, as Keys.

    Args:
        packed: n * key_bytes bytes.
        key_bytes: length of the space's keys.
        parent: key before the first one; empty or all-zero when the first one starts a chain.

    Raises:
        InvalidRequest: a length is wrong, or a key is the reserved all-zero one.
    """
    if parent == bytes(key_bytes):
        parent = b""
    keys = Keys(packed, key_bytes, parent or None)
    if packed and not np.frombuffer(packed, np.uint8).reshape(-1, key_bytes).any(axis=1).all():
        raise InvalidRequest("keys", "the all-zero key is reserved")
    return keys


def pack_run_parent(keys: Keys) -> bytes:
    """Return the `parent` of a call that reads a run: what its first block must hang on."""
    return keys.parent or (bytes(keys.key_bytes) if keys.root else b"")


def pack_parents(parents: Iterable[bytes | None], key_bytes: int) -> bytes:
    """Return one parent key an item, packed; None becomes the all-zero key."""
    none = bytes(key_bytes)
    return b"".join(none if parent is None else parent for parent in parents)


def pack_chain_parents(keys: Keys) -> bytes:
    """Return the packed parents of a run: its own keys, one later."""
    size = keys.key_bytes
    return ((keys.parent or bytes(size)) + keys.packed)[: len(keys.packed)]


def unpack_parents(packed: bytes, key_bytes: int) -> list[bytes | None]:
    """Return packed parents one by one; the all-zero key becomes None.

    Raises:
        InvalidRequest: not a whole number of keys.
    """
    if len(packed) % key_bytes:
        raise InvalidRequest(
            "parents", f"{len(packed)} bytes are not a whole number of {key_bytes}-byte keys"
        )
    none = bytes(key_bytes)
    parts = (packed[at : at + key_bytes] for at in range(0, len(packed), key_bytes))
    return [None if part == none else part for part in parts]


def miss_to_message(miss: Miss) -> pb.Miss:
    """Return the message of a miss."""
    return pb.Miss(
        reason=miss.reason.name,
        tier=tier_value(miss.tier),
        unix_ms=max(0, round(miss.unix_seconds * 1e3)),
    )


def miss_from_message(message: pb.Miss) -> Miss:
    """Return the miss that a message means; a reason from a newer daemon reads as FORGOTTEN."""
    known = {pb.Miss.Reason.Value(reason.name): reason for reason in MissReason}
    return Miss(
        known.get(message.reason, MissReason.FORGOTTEN),
        tier_name(message.tier),
        message.unix_ms / 1e3,
    )


# The most derived class of an error decides; what is not listed is INTERNAL.
ERRORS: Final[dict[type[KVStoreError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownSpace: grpc.StatusCode.NOT_FOUND,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AttachmentLost: grpc.StatusCode.ABORTED,
    errors.Busy: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseLost: grpc.StatusCode.ABORTED,
    errors.TierFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TierUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.TierClosed: grpc.StatusCode.UNAVAILABLE,
    errors.CorruptBlock: grpc.StatusCode.DATA_LOSS,
    errors.TierError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ClientClosed: grpc.StatusCode.CANCELLED,
    errors.ServerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.NotImplementedByServer: grpc.StatusCode.UNIMPLEMENTED,
}
_CLASSES: Final = {kind.__name__: kind for kind in ERRORS}

# What a status means when it carries no class, that is when gRPC itself raised it. CANCELLED:
# a stopping server resets its calls so; a client that cancels knows that it did.
_BARE: Final[dict[grpc.StatusCode, type[KVStoreError]]] = {
    grpc.StatusCode.UNAVAILABLE: errors.ServerUnavailable,
    grpc.StatusCode.CANCELLED: errors.ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNIMPLEMENTED: errors.NotImplementedByServer,
}


def status_of(
    error: BaseException,
) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return an error as gRPC status, one-line message and trailing metadata.

    Errors that are not kvstore's own become INTERNAL with their class only: their text is for
    the daemon's log.
    """
    for kind in type(error).__mro__:
        if kind in ERRORS:
            metadata: tuple[tuple[str, str], ...] = ((_ERROR_KEY, kind.__name__),)
            if isinstance(error, errors.TierError) and error.errno:
                metadata += ((_ERRNO_KEY, str(error.errno)),)
            return ERRORS[kind], " ".join(str(error).split()), metadata
    text = str(error) if isinstance(error, KVStoreError) else type(error).__name__
    message = f"internal error: {' '.join(text.split())}"
    return grpc.StatusCode.INTERNAL, message, ((_ERROR_KEY, KVStoreError.__name__),)


def error_from_rpc(rpc: grpc.RpcError) -> KVStoreError:
    """Return the error that a failed call means; the caller raises it `from` the call's."""
    # grpc's own classes give these methods to every RpcError that a call raises.
    call: Any = rpc
    code: grpc.StatusCode = call.code()
    message = call.details() or code.name
    metadata = {key: value for key, value in call.trailing_metadata() or ()}
    kind = _CLASSES.get(str(metadata.get(_ERROR_KEY, "")))
    if kind is None:
        if code is grpc.StatusCode.UNKNOWN and "stream removed" in message.lower():
            return errors.ServerUnavailable(message)
        return _BARE.get(code, KVStoreError)(message)
    if issubclass(kind, InvalidRequest):
        field, _, problem = message.partition(": ")
        return kind(field, problem)
    if issubclass(kind, errors.TierError):
        tier, _, problem = message.partition(" tier: ")
        return kind(tier, problem, int(metadata.get(_ERRNO_KEY, "0")))
    return kind(message)


def channel_options(*, local: bool) -> Sequence[tuple[str, int]]:
    """Return a client's channel options.

    Args:
        local: the address is a Unix socket, where a dead peer is noticed at once; TCP needs
            keepalive pings for that.
    """
    options = [
        # Channels that share subchannels also share their reconnect back-off: a new client
        # would wait for an old one's.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long a connection may take, despite its name: a daemon that is stopped accepts, and
        # says nothing.
        ("grpc.min_reconnect_backoff_ms", 3_000),
        ("grpc.max_reconnect_backoff_ms", 200 if local else 500),
        # An http_proxy in the environment must not see KV bytes.
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    if not local:
        options += [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000)]
    return options


def server_options() -> Sequence[tuple[str, int]]:
    """Return the daemon's server options."""
    return [
        # Two daemons on one port would each serve half of the clients.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ]
