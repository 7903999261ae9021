"""Both sides mean the same by a message, and by an error."""

from __future__ import annotations

import inspect
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors, wire
from kvstore.keys import Keys
from kvstore.miss import Miss, MissReason
from kvstore.outcomes import CommitOutcome, Shortage
from kvstore.proto import kvstore_pb2 as pb
from kvstore.space import SpaceSpec

SPECS = st.builds(
    SpaceSpec,
    model=st.text(min_size=1, max_size=9),
    dtype=st.sampled_from(["bfloat16", "fp8"]),
    block_tokens=st.integers(1, 4096),
    shard_bytes=st.lists(st.integers(1, 1 << 22), min_size=1, max_size=5),
    layout=st.sampled_from(["opaque", "x"]),
    weights_version=st.text(max_size=5),
    tensor_parallel=st.integers(1, 9),
    pipeline_parallel=st.just(3),
    pipeline_rank=st.integers(0, 2),
    context_parallel=st.integers(1, 2),
    kv_group=st.text(max_size=3),
    hash_algorithm=st.sampled_from(["xxh3-128", "sha256", "engine's"]),
    root_seed=st.text(max_size=3),
    tenant=st.text(max_size=3),
    key_bytes=st.sampled_from([0, 16, 32]),
)


@given(SPECS)
def test_a_spec_keeps_its_fingerprint_over_the_wire(spec: SpaceSpec) -> None:
    message = pb.SpaceSpec.FromString(wire.spec_to_message(spec).SerializeToString())
    assert wire.spec_from_message(message) == spec
    assert wire.spec_from_message(message).fingerprint == spec.fingerprint


def test_every_field_of_a_spec_travels() -> None:
    fields = {field.name for field in pb.SpaceSpec.DESCRIPTOR.fields}
    assert fields == set(inspect.signature(SpaceSpec).parameters)


def test_a_minimal_spec_from_another_language_gets_the_defaults() -> None:
    message = pb.SpaceSpec(model="m", dtype="d", block_tokens=16, shard_bytes=[1])
    spec = SpaceSpec(model="m", dtype="d", block_tokens=16, shard_bytes=(1,))
    assert wire.spec_from_message(message) == spec


def test_a_bad_spec_names_the_field() -> None:
    with pytest.raises(errors.InvalidRequest, match="^shard_bytes: "):
        wire.spec_from_message(pb.SpaceSpec(model="m", dtype="d", block_tokens=16))


def test_slots_are_packed_as_the_contract_says() -> None:
    slots = wire.slot_array([(1, 2, 3), (0xFFFFFFFF, 7, (1 << 64) - 1)])
    packed = wire.pack_slots(slots)
    assert packed[:16] == b"\1\0\0\0\2\0\0\0\3\0\0\0\0\0\0\0"
    assert (wire.unpack_slots(packed) == slots).all()
    assert wire.pack_slot_names(slots) == packed[:8] + packed[16:24]
    names = wire.unpack_slot_names(wire.pack_slot_names(slots))
    assert names["group"].tolist() == [1, 0xFFFFFFFF]
    assert wire.pack_slot_names(names) == wire.pack_slot_names(slots)
    assert len(wire.slot_array([])) == 0


@pytest.mark.parametrize("unpack", [wire.unpack_slots, wire.unpack_slot_names])
def test_a_torn_record_is_refused(unpack: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="^slots: "):
        unpack(bytes(17))


def test_parents_of_a_run_are_its_keys_one_later() -> None:
    keys = Keys(bytes(range(1, 49)), 16)
    listed: list[bytes | None] = [None, keys[0], keys[1]]
    assert wire.pack_chain_parents(keys) == wire.pack_parents(listed, 16)
    assert wire.unpack_parents(wire.pack_chain_parents(keys), 16) == listed
    assert wire.pack_chain_parents(keys[1:]) == wire.pack_parents(listed[1:], 16)
    assert wire.pack_chain_parents(keys[:0]) == b""


def test_the_reserved_key_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="^keys: "):
        wire.unpack_keys(b"\1" * 16 + bytes(16), 16)
    assert len(wire.unpack_keys(bytes(15) + b"\1", 16)) == 1


@pytest.mark.parametrize("reason", list(MissReason))
def test_a_miss_travels(reason: MissReason) -> None:
    miss = Miss(reason, "disk", 1700000000.125)
    assert wire.miss_from_message(wire.miss_to_message(miss)) == miss


def test_reasons_of_the_contract_are_all_known() -> None:
    assert {r.name for r in MissReason} == set(pb.Miss.Reason.keys())
    assert {o.name: int(o) for o in CommitOutcome} == {
        name: value for name, value in pb.CommitOutcome.items() if value
    }
    assert {s.name: int(s) for s in Shortage} == dict(pb.ReserveResponse.Shortage.items())


def test_a_reason_of_a_newer_daemon_is_a_plain_miss() -> None:
    newer = pb.Miss.FromString(b"\x08\x63")  # reason = 99
    assert wire.miss_from_message(newer).reason is MissReason.FORGOTTEN


class Failed(grpc.RpcError):
    """What a failed call raises."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        super().__init__()
        self._answer = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str:
        return self._answer[1]

    def trailing_metadata(self) -> Any:
        return self._answer[2]


EXAMPLES: list[errors.KVStoreError] = [
    errors.InvalidRequest("keys", "too many: 9"),
    errors.ConfigError("no such setting"),
    errors.UnknownSpace("open it again"),
    errors.StaleEpoch("epoch 3 is over"),
    errors.AttachmentLost("attach again"),
    errors.Busy("it is under way"),
    errors.LeaseLost("gone"),
    errors.TierFull("host", "no slot", 28),
    errors.TierUnavailable("disk", "it fails: EIO", 5),
    errors.TierClosed("disk", "closed"),
    errors.CorruptBlock("disk", "digest differs"),
    errors.TierError("disk", "odd"),
    errors.DeadlineExceeded("late"),
    errors.ClientClosed("closed"),
    errors.ServerUnavailable("nobody"),
    errors.NotImplementedByServer("not yet"),
]


def test_the_error_table_is_complete() -> None:
    raised = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.KVStoreError)
    }
    # The base class, and what only a start of the daemon raises.
    assert raised - set(wire.ERRORS) == {errors.KVStoreError, errors.FormatVersionError}
    assert {type(e) for e in EXAMPLES} == set(wire.ERRORS)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_an_error_arrives_as_it_was_raised(error: errors.KVStoreError) -> None:
    code, message, metadata = wire.status_of(error)
    assert code is wire.ERRORS[type(error)]
    again = wire.error_from_rpc(Failed(code, message, metadata))
    assert type(again) is type(error)
    assert str(again) == str(error)
    for name in ("field", "tier", "errno"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_a_bug_in_the_daemon_tells_its_class_only() -> None:
    code, message, metadata = wire.status_of(KeyError("secret path"))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message
    again = wire.error_from_rpc(Failed(code, message, metadata))
    assert type(again) is errors.KVStoreError
    assert "KeyError" in str(again)


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect", errors.ServerUnavailable),
        (grpc.StatusCode.CANCELLED, "Received RST_STREAM", errors.ServerUnavailable),
        (grpc.StatusCode.UNKNOWN, "Stream removed", errors.ServerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", errors.DeadlineExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", errors.NotImplementedByServer),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "message too large", errors.KVStoreError),
    ],
)
def test_grpc_s_own_failures_are_told_apart_from_the_daemon_s(
    code: grpc.StatusCode, details: str, kind: type[errors.KVStoreError]
) -> None:
    assert type(wire.error_from_rpc(Failed(code, details))) is kind


def test_the_largest_messages_fit() -> None:
    keys = Keys(np.random.default_rng(1).bytes(32 * wire.MAX_KEYS), 32)
    slots = np.zeros(wire.MAX_KEYS, wire.SLOT_DTYPE)
    commit = pb.CommitRequest(
        slots=wire.pack_slot_names(slots), keys=keys.packed, parents=wire.pack_chain_parents(keys)
    )
    assert commit.ByteSize() < wire.MAX_MESSAGE_BYTES * 0.9
    answer = pb.AcquireResponse(slots=wire.pack_slots(slots), tiers=bytes(wire.MAX_KEYS))
    assert answer.ByteSize() < wire.MAX_MESSAGE_BYTES * 0.9


@pytest.mark.parametrize(("name", "value"), [("gpu", 1), ("host", 2), ("disk", 3)])
def test_tiers_have_names(name: str, value: int) -> None:
    assert wire.tier_value(name) == value
    assert wire.tier_name(value) == name


def test_an_unknown_tier_is_refused_by_name() -> None:
    assert wire.tier_value(None) == pb.TIER_UNSPECIFIED
    assert wire.tier_name(99) == ""
    with pytest.raises(errors.InvalidRequest, match="^tier: 'tape'"):
        wire.tier_value("tape")


def test_an_all_zero_parent_starts_a_chain() -> None:
    assert wire.unpack_keys(b"k" * 16, 16, bytes(16)).parent is None
    assert wire.unpack_keys(b"k" * 16, 16, b"p" * 16).parent == b"p" * 16
    with pytest.raises(errors.InvalidRequest, match="^parent: "):
        wire.unpack_keys(b"k" * 16, 16, bytes(8))
