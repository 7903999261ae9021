from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_GPU: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]

class CommitOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_OUTCOME_UNSPECIFIED: _ClassVar[CommitOutcome]
    COMMITTED: _ClassVar[CommitOutcome]
    WAITING: _ClassVar[CommitOutcome]
    EXISTS: _ClassVar[CommitOutcome]
    PARENT_MISSING: _ClassVar[CommitOutcome]
    UNKNOWN_SLOT: _ClassVar[CommitOutcome]
    KEY_MISMATCH: _ClassVar[CommitOutcome]
    ABORTED: _ClassVar[CommitOutcome]
TIER_UNSPECIFIED: Tier
TIER_GPU: Tier
TIER_HOST: Tier
TIER_DISK: Tier
COMMIT_OUTCOME_UNSPECIFIED: CommitOutcome
COMMITTED: CommitOutcome
WAITING: CommitOutcome
EXISTS: CommitOutcome
PARENT_MISSING: CommitOutcome
UNKNOWN_SLOT: CommitOutcome
KEY_MISMATCH: CommitOutcome
ABORTED: CommitOutcome

class SpaceRef(_message.Message):
    __slots__ = ("id", "epoch")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    epoch: int
    def __init__(self, id: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class SpaceSpec(_message.Message):
    __slots__ = ("model", "weights_version", "dtype", "block_tokens", "shard_bytes", "tensor_parallel", "pipeline_parallel", "pipeline_rank", "context_parallel", "layout", "kv_group", "hash_algorithm", "root_seed", "tenant", "key_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_RANK_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ROOT_SEED_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights_version: str
    dtype: str
    block_tokens: int
    shard_bytes: _containers.RepeatedScalarFieldContainer[int]
    tensor_parallel: int
    pipeline_parallel: int
    pipeline_rank: int
    context_parallel: int
    layout: str
    kv_group: str
    hash_algorithm: str
    root_seed: str
    tenant: str
    key_bytes: int
    def __init__(self, model: _Optional[str] = ..., weights_version: _Optional[str] = ..., dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., shard_bytes: _Optional[_Iterable[int]] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., pipeline_rank: _Optional[int] = ..., context_parallel: _Optional[int] = ..., layout: _Optional[str] = ..., kv_group: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., root_seed: _Optional[str] = ..., tenant: _Optional[str] = ..., key_bytes: _Optional[int] = ...) -> None: ...

class Miss(_message.Message):
    __slots__ = ("reason", "tier", "unix_ms")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[Miss.Reason]
        NEVER_SEEN: _ClassVar[Miss.Reason]
        EVICTED: _ClassVar[Miss.Reason]
        FORGOTTEN: _ClassVar[Miss.Reason]
        OTHER_EPOCH: _ClassVar[Miss.Reason]
        CORRUPT: _ClassVar[Miss.Reason]
        IO_ERROR: _ClassVar[Miss.Reason]
        DEADLINE: _ClassVar[Miss.Reason]
        NOT_WORTH_WAITING: _ClassVar[Miss.Reason]
        NOT_READY: _ClassVar[Miss.Reason]
        LEASE_CAP: _ClassVar[Miss.Reason]
        LEASE_LOST: _ClassVar[Miss.Reason]
        NO_ROOM: _ClassVar[Miss.Reason]
        EXPIRED: _ClassVar[Miss.Reason]
    NONE: Miss.Reason
    NEVER_SEEN: Miss.Reason
    EVICTED: Miss.Reason
    FORGOTTEN: Miss.Reason
    OTHER_EPOCH: Miss.Reason
    CORRUPT: Miss.Reason
    IO_ERROR: Miss.Reason
    DEADLINE: Miss.Reason
    NOT_WORTH_WAITING: Miss.Reason
    NOT_READY: Miss.Reason
    LEASE_CAP: Miss.Reason
    LEASE_LOST: Miss.Reason
    NO_ROOM: Miss.Reason
    EXPIRED: Miss.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    reason: Miss.Reason
    tier: Tier
    unix_ms: int
    def __init__(self, reason: _Optional[_Union[Miss.Reason, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., unix_ms: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "client")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client: str
    def __init__(self, protocol_version: _Optional[int] = ..., client: _Optional[str] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("protocol_version", "server_version", "boot_id", "machine_id", "tiers")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_ID_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    server_version: str
    boot_id: bytes
    machine_id: str
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    def __init__(self, protocol_version: _Optional[int] = ..., server_version: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., machine_id: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ...) -> None: ...

class AttachUp(_message.Message):
    __slots__ = ("open", "locked", "heartbeat", "unmapped", "detach", "devices")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    UNMAPPED_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    open: AttachOpen
    locked: AttachLocked
    heartbeat: Heartbeat
    unmapped: SlabsUnmapped
    detach: Detach
    devices: Devices
    def __init__(self, open: _Optional[_Union[AttachOpen, _Mapping]] = ..., locked: _Optional[_Union[AttachLocked, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., unmapped: _Optional[_Union[SlabsUnmapped, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ..., devices: _Optional[_Union[Devices, _Mapping]] = ...) -> None: ...

class Devices(_message.Message):
    __slots__ = ("uuids",)
    UUIDS_FIELD_NUMBER: _ClassVar[int]
    uuids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, uuids: _Optional[_Iterable[str]] = ...) -> None: ...

class AttachOpen(_message.Message):
    __slots__ = ("client", "pid", "map_memory", "shards", "devices")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MAP_MEMORY_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    client: str
    pid: int
    map_memory: bool
    shards: _containers.RepeatedScalarFieldContainer[int]
    devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, client: _Optional[str] = ..., pid: _Optional[int] = ..., map_memory: bool = ..., shards: _Optional[_Iterable[int]] = ..., devices: _Optional[_Iterable[str]] = ...) -> None: ...

class AttachLocked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("usage", "times")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    usage: _containers.RepeatedCompositeFieldContainer[Usage]
    times: _containers.RepeatedCompositeFieldContainer[OperationTimes]
    def __init__(self, usage: _Optional[_Iterable[_Union[Usage, _Mapping]]] = ..., times: _Optional[_Iterable[_Union[OperationTimes, _Mapping]]] = ...) -> None: ...

class OperationTimes(_message.Message):
    __slots__ = ("operation", "buckets", "total_seconds", "longest_seconds")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    operation: str
    buckets: _containers.RepeatedScalarFieldContainer[int]
    total_seconds: float
    longest_seconds: float
    def __init__(self, operation: _Optional[str] = ..., buckets: _Optional[_Iterable[int]] = ..., total_seconds: _Optional[float] = ..., longest_seconds: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("space", "requests", "prompt_tokens", "reused_tokens_gpu", "reused_tokens_host", "reused_tokens_disk", "local_tokens", "load_failures", "loaded_bytes", "stored_bytes")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_GPU_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_HOST_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_DISK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    requests: int
    prompt_tokens: int
    reused_tokens_gpu: int
    reused_tokens_host: int
    reused_tokens_disk: int
    local_tokens: int
    load_failures: int
    loaded_bytes: int
    stored_bytes: int
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., reused_tokens_gpu: _Optional[int] = ..., reused_tokens_host: _Optional[int] = ..., reused_tokens_disk: _Optional[int] = ..., local_tokens: _Optional[int] = ..., load_failures: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class SlabsUnmapped(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, groups: _Optional[_Iterable[int]] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachDown(_message.Message):
    __slots__ = ("attached", "slab", "retire", "lease_grown", "lease_done", "revoked", "boot_end", "active", "grant_revoked")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    LEASE_GROWN_FIELD_NUMBER: _ClassVar[int]
    LEASE_DONE_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    BOOT_END_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    GRANT_REVOKED_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    slab: Slab
    retire: SlabRetire
    lease_grown: LeaseGrown
    lease_done: LeaseDone
    revoked: LeasesRevoked
    boot_end: BootEnd
    active: Active
    grant_revoked: GrantRevoked
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., slab: _Optional[_Union[Slab, _Mapping]] = ..., retire: _Optional[_Union[SlabRetire, _Mapping]] = ..., lease_grown: _Optional[_Union[LeaseGrown, _Mapping]] = ..., lease_done: _Optional[_Union[LeaseDone, _Mapping]] = ..., revoked: _Optional[_Union[LeasesRevoked, _Mapping]] = ..., boot_end: _Optional[_Union[BootEnd, _Mapping]] = ..., active: _Optional[_Union[Active, _Mapping]] = ..., grant_revoked: _Optional[_Union[GrantRevoked, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("attachment_id", "control_path", "lock_offset", "heartbeat_interval_ms", "lease_ttl_ms", "lease_cap_bytes")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PATH_FIELD_NUMBER: _ClassVar[int]
    LOCK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    attachment_id: int
    control_path: str
    lock_offset: int
    heartbeat_interval_ms: int
    lease_ttl_ms: int
    lease_cap_bytes: int
    def __init__(self, attachment_id: _Optional[int] = ..., control_path: _Optional[str] = ..., lock_offset: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., lease_cap_bytes: _Optional[int] = ...) -> None: ...

class Active(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Slab(_message.Message):
    __slots__ = ("group", "shard", "tier", "slot_bytes", "slots", "data_offset", "length", "path", "cuda")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DATA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    group: int
    shard: int
    tier: Tier
    slot_bytes: int
    slots: int
    data_offset: int
    length: int
    path: str
    cuda: CudaIpc
    def __init__(self, group: _Optional[int] = ..., shard: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., slot_bytes: _Optional[int] = ..., slots: _Optional[int] = ..., data_offset: _Optional[int] = ..., length: _Optional[int] = ..., path: _Optional[str] = ..., cuda: _Optional[_Union[CudaIpc, _Mapping]] = ...) -> None: ...

class CudaIpc(_message.Message):
    __slots__ = ("handle", "device_uuid", "offset", "generations_path", "allocation_bytes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_PATH_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    device_uuid: str
    offset: int
    generations_path: str
    allocation_bytes: int
    def __init__(self, handle: _Optional[bytes] = ..., device_uuid: _Optional[str] = ..., offset: _Optional[int] = ..., generations_path: _Optional[str] = ..., allocation_bytes: _Optional[int] = ...) -> None: ...

class SlabRetire(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, groups: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseGrown(_message.Message):
    __slots__ = ("lease_id", "first", "slots", "tiers")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    first: int
    slots: bytes
    tiers: bytes
    def __init__(self, lease_id: _Optional[int] = ..., first: _Optional[int] = ..., slots: _Optional[bytes] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class LeaseDone(_message.Message):
    __slots__ = ("lease_id", "blocks", "miss")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    blocks: int
    miss: Miss
    def __init__(self, lease_id: _Optional[int] = ..., blocks: _Optional[int] = ..., miss: _Optional[_Union[Miss, _Mapping]] = ...) -> None: ...

class LeasesRevoked(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GrantRevoked(_message.Message):
    __slots__ = ("owner_id", "grant_id")
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    owner_id: int
    grant_id: int
    def __init__(self, owner_id: _Optional[int] = ..., grant_id: _Optional[int] = ...) -> None: ...

class BootEnd(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class OpenSpaceRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: SpaceSpec
    def __init__(self, spec: _Optional[_Union[SpaceSpec, _Mapping]] = ...) -> None: ...

class OpenSpaceResponse(_message.Message):
    __slots__ = ("space", "key_bytes", "block_bytes", "slot_bytes")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    key_bytes: int
    block_bytes: int
    slot_bytes: int
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., key_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ...) -> None: ...

class MakeRoomRequest(_message.Message):
    __slots__ = ("shard_bytes",)
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    shard_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shard_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class MakeRoomResponse(_message.Message):
    __slots__ = ("made_bytes", "expected_bytes", "groups")
    MADE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    made_bytes: int
    expected_bytes: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, made_bytes: _Optional[int] = ..., expected_bytes: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("space", "keys", "parent")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    keys: bytes
    parent: bytes
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., keys: _Optional[bytes] = ..., parent: _Optional[bytes] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("blocks", "tiers", "miss")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    tiers: bytes
    miss: Miss
    def __init__(self, blocks: _Optional[int] = ..., tiers: _Optional[bytes] = ..., miss: _Optional[_Union[Miss, _Mapping]] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("attachment_id", "space", "lease_id", "keys", "deadline_ms", "prefill_tokens_per_second", "priority", "parent", "request_id", "remembered_rate", "queued_ms")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_RATE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: int
    space: SpaceRef
    lease_id: int
    keys: bytes
    deadline_ms: int
    prefill_tokens_per_second: float
    priority: int
    parent: bytes
    request_id: str
    remembered_rate: bool
    queued_ms: int
    def __init__(self, attachment_id: _Optional[int] = ..., space: _Optional[_Union[SpaceRef, _Mapping]] = ..., lease_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., priority: _Optional[int] = ..., parent: _Optional[bytes] = ..., request_id: _Optional[str] = ..., remembered_rate: bool = ..., queued_ms: _Optional[int] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("blocks", "slots", "tiers", "growing", "miss", "present")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    GROWING_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    slots: bytes
    tiers: bytes
    growing: bool
    miss: Miss
    present: int
    def __init__(self, blocks: _Optional[int] = ..., slots: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., growing: bool = ..., miss: _Optional[_Union[Miss, _Mapping]] = ..., present: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("attachment_id", "lease_ids")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attachment_id: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("space", "keys", "deadline_ms", "parent")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    keys: bytes
    deadline_ms: int
    parent: bytes
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., keys: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., parent: _Optional[bytes] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("chunk", "end")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    end: GetEnd
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., end: _Optional[_Union[GetEnd, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("block", "offset", "data")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    data: bytes
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetEnd(_message.Message):
    __slots__ = ("blocks", "miss")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    miss: Miss
    def __init__(self, blocks: _Optional[int] = ..., miss: _Optional[_Union[Miss, _Mapping]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("space", "keys", "tier", "ticket_id", "deadline_ms", "priority", "wait_ms")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    keys: bytes
    tier: Tier
    ticket_id: int
    deadline_ms: int
    priority: int
    wait_ms: int
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., keys: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ..., ticket_id: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("blocks", "done", "miss")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    done: bool
    miss: Miss
    def __init__(self, blocks: _Optional[int] = ..., done: bool = ..., miss: _Optional[_Union[Miss, _Mapping]] = ...) -> None: ...

class CancelPrefetchRequest(_message.Message):
    __slots__ = ("ticket_ids",)
    TICKET_IDS_FIELD_NUMBER: _ClassVar[int]
    ticket_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelPrefetchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("attachment_id", "space", "grant_id", "count", "writers", "deadline_ms", "protect", "keys", "parent")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PROTECT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    attachment_id: int
    space: SpaceRef
    grant_id: int
    count: int
    writers: _containers.RepeatedScalarFieldContainer[int]
    deadline_ms: int
    protect: bytes
    keys: bytes
    parent: bytes
    def __init__(self, attachment_id: _Optional[int] = ..., space: _Optional[_Union[SpaceRef, _Mapping]] = ..., grant_id: _Optional[int] = ..., count: _Optional[int] = ..., writers: _Optional[_Iterable[int]] = ..., deadline_ms: _Optional[int] = ..., protect: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., parent: _Optional[bytes] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("slots", "shortage", "present")
    class Shortage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[ReserveResponse.Shortage]
        BUSY: _ClassVar[ReserveResponse.Shortage]
        NO_ROOM: _ClassVar[ReserveResponse.Shortage]
        CLIENT_CAP: _ClassVar[ReserveResponse.Shortage]
        DRAINING: _ClassVar[ReserveResponse.Shortage]
        ORPHAN: _ClassVar[ReserveResponse.Shortage]
        QUOTA: _ClassVar[ReserveResponse.Shortage]
    NONE: ReserveResponse.Shortage
    BUSY: ReserveResponse.Shortage
    NO_ROOM: ReserveResponse.Shortage
    CLIENT_CAP: ReserveResponse.Shortage
    DRAINING: ReserveResponse.Shortage
    ORPHAN: ReserveResponse.Shortage
    QUOTA: ReserveResponse.Shortage
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SHORTAGE_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    slots: bytes
    shortage: ReserveResponse.Shortage
    present: int
    def __init__(self, slots: _Optional[bytes] = ..., shortage: _Optional[_Union[ReserveResponse.Shortage, str]] = ..., present: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("attachment_id", "grant_id", "owner_id", "shard", "slots", "keys", "parents", "space")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    attachment_id: int
    grant_id: int
    owner_id: int
    shard: int
    slots: bytes
    keys: bytes
    parents: bytes
    space: SpaceRef
    def __init__(self, attachment_id: _Optional[int] = ..., grant_id: _Optional[int] = ..., owner_id: _Optional[int] = ..., shard: _Optional[int] = ..., slots: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., space: _Optional[_Union[SpaceRef, _Mapping]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("attachment_id", "grant_id", "owner_id", "slots", "all_shards")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ALL_SHARDS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: int
    grant_id: int
    owner_id: int
    slots: bytes
    all_shards: bool
    def __init__(self, attachment_id: _Optional[int] = ..., grant_id: _Optional[int] = ..., owner_id: _Optional[int] = ..., slots: _Optional[bytes] = ..., all_shards: bool = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("space", "keys", "parent", "deadline_ms")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    keys: bytes
    parent: bytes
    deadline_ms: int
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., keys: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("space", "keys", "ttl_ms", "owner")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    keys: bytes
    ttl_ms: int
    owner: str
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., keys: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("space", "keys", "owner")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    keys: bytes
    owner: str
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., keys: _Optional[bytes] = ..., owner: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("space", "keys", "tier")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    keys: bytes
    tier: Tier
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., keys: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("copies", "skipped")
    COPIES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    copies: int
    skipped: int
    def __init__(self, copies: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class BumpEpochRequest(_message.Message):
    __slots__ = ("space",)
    SPACE_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ...) -> None: ...

class BumpEpochResponse(_message.Message):
    __slots__ = ("space",)
    SPACE_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("space", "keys", "request_id")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    keys: bytes
    request_id: str
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., keys: _Optional[bytes] = ..., request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("blocks", "miss", "lines", "others", "asked", "space", "key")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    miss: Miss
    lines: _containers.RepeatedScalarFieldContainer[str]
    others: _containers.RepeatedCompositeFieldContainer[OtherSpace]
    asked: int
    space: SpaceRef
    key: bytes
    def __init__(self, blocks: _Optional[int] = ..., miss: _Optional[_Union[Miss, _Mapping]] = ..., lines: _Optional[_Iterable[str]] = ..., others: _Optional[_Iterable[_Union[OtherSpace, _Mapping]]] = ..., asked: _Optional[int] = ..., space: _Optional[_Union[SpaceRef, _Mapping]] = ..., key: _Optional[bytes] = ...) -> None: ...

class OtherSpace(_message.Message):
    __slots__ = ("space", "blocks", "differences")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    blocks: int
    differences: _containers.RepeatedCompositeFieldContainer[FieldDifference]
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., blocks: _Optional[int] = ..., differences: _Optional[_Iterable[_Union[FieldDifference, _Mapping]]] = ...) -> None: ...

class FieldDifference(_message.Message):
    __slots__ = ("field", "here", "there")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    THERE_FIELD_NUMBER: _ClassVar[int]
    field: str
    here: str
    there: str
    def __init__(self, field: _Optional[str] = ..., here: _Optional[str] = ..., there: _Optional[str] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("done", "blocks", "skipped", "skipped_blocks")
    DONE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    done: bool
    blocks: int
    skipped: int
    skipped_blocks: _containers.RepeatedCompositeFieldContainer[SkippedBlock]
    def __init__(self, done: bool = ..., blocks: _Optional[int] = ..., skipped: _Optional[int] = ..., skipped_blocks: _Optional[_Iterable[_Union[SkippedBlock, _Mapping]]] = ...) -> None: ...

class SkippedBlock(_message.Message):
    __slots__ = ("space_id", "key", "reason")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    key: bytes
    reason: str
    def __init__(self, space_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("done", "grants", "skipped")
    DONE_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    done: bool
    grants: int
    skipped: int
    def __init__(self, done: bool = ..., grants: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class SetCapacityRequest(_message.Message):
    __slots__ = ("tier", "bytes", "deadline_ms")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    bytes: int
    deadline_ms: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., bytes: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class SetCapacityResponse(_message.Message):
    __slots__ = ("bytes", "done", "evicted")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    done: bool
    evicted: int
    def __init__(self, bytes: _Optional[int] = ..., done: bool = ..., evicted: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("fraction", "bytes_per_second")
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    fraction: float
    bytes_per_second: int
    def __init__(self, fraction: _Optional[float] = ..., bytes_per_second: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("checked", "damaged", "done", "total", "bytes", "unreadable", "gone", "dropped", "lost", "faults")
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    checked: int
    damaged: int
    done: bool
    total: int
    bytes: int
    unreadable: int
    gone: int
    dropped: int
    lost: int
    faults: _containers.RepeatedCompositeFieldContainer[BlockFault]
    def __init__(self, checked: _Optional[int] = ..., damaged: _Optional[int] = ..., done: bool = ..., total: _Optional[int] = ..., bytes: _Optional[int] = ..., unreadable: _Optional[int] = ..., gone: _Optional[int] = ..., dropped: _Optional[int] = ..., lost: _Optional[int] = ..., faults: _Optional[_Iterable[_Union[BlockFault, _Mapping]]] = ...) -> None: ...

class BlockFault(_message.Message):
    __slots__ = ("space_id", "key", "segment", "slot", "problem", "kept")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    key: bytes
    segment: int
    slot: int
    problem: str
    kept: bool
    def __init__(self, space_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., segment: _Optional[int] = ..., slot: _Optional[int] = ..., problem: _Optional[str] = ..., kept: bool = ...) -> None: ...

class DoctorRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DoctorResponse(_message.Message):
    __slots__ = ("findings",)
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    findings: _containers.RepeatedCompositeFieldContainer[DoctorFinding]
    def __init__(self, findings: _Optional[_Iterable[_Union[DoctorFinding, _Mapping]]] = ...) -> None: ...

class DoctorFinding(_message.Message):
    __slots__ = ("subject", "level", "text", "advice")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    subject: str
    level: str
    text: str
    advice: str
    def __init__(self, subject: _Optional[str] = ..., level: _Optional[str] = ..., text: _Optional[str] = ..., advice: _Optional[str] = ...) -> None: ...

class ListSpacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSpacesResponse(_message.Message):
    __slots__ = ("spaces",)
    SPACES_FIELD_NUMBER: _ClassVar[int]
    spaces: _containers.RepeatedCompositeFieldContainer[SpaceInfo]
    def __init__(self, spaces: _Optional[_Iterable[_Union[SpaceInfo, _Mapping]]] = ...) -> None: ...

class SpaceInfo(_message.Message):
    __slots__ = ("space", "spec", "blocks", "blocks_host", "blocks_disk", "blocks_gpu", "pinned", "usage", "bytes_gpu", "bytes_host", "bytes_disk", "pinned_bytes", "pins_end_unix_ms", "limits", "own_limits")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HOST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DISK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_GPU_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    BYTES_GPU_FIELD_NUMBER: _ClassVar[int]
    BYTES_HOST_FIELD_NUMBER: _ClassVar[int]
    BYTES_DISK_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINS_END_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    OWN_LIMITS_FIELD_NUMBER: _ClassVar[int]
    space: SpaceRef
    spec: SpaceSpec
    blocks: int
    blocks_host: int
    blocks_disk: int
    blocks_gpu: int
    pinned: int
    usage: Usage
    bytes_gpu: int
    bytes_host: int
    bytes_disk: int
    pinned_bytes: int
    pins_end_unix_ms: int
    limits: Limits
    own_limits: Limits
    def __init__(self, space: _Optional[_Union[SpaceRef, _Mapping]] = ..., spec: _Optional[_Union[SpaceSpec, _Mapping]] = ..., blocks: _Optional[int] = ..., blocks_host: _Optional[int] = ..., blocks_disk: _Optional[int] = ..., blocks_gpu: _Optional[int] = ..., pinned: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., bytes_gpu: _Optional[int] = ..., bytes_host: _Optional[int] = ..., bytes_disk: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., pins_end_unix_ms: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., own_limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("gpu_bytes", "host_bytes", "disk_bytes", "ttl_ms")
    GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    ttl_ms: int
    def __init__(self, gpu_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("space_id", "limits", "clear")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    limits: Limits
    clear: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, space_id: _Optional[bytes] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., clear: _Optional[_Iterable[str]] = ...) -> None: ...

class SetLimitsResponse(_message.Message):
    __slots__ = ("limits", "own_limits")
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    OWN_LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: Limits
    own_limits: Limits
    def __init__(self, limits: _Optional[_Union[Limits, _Mapping]] = ..., own_limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ("space_id", "owner")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    owner: str
    def __init__(self, space_id: _Optional[bytes] = ..., owner: _Optional[str] = ...) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[PinGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[PinGroup, _Mapping]]] = ...) -> None: ...

class PinGroup(_message.Message):
    __slots__ = ("space_id", "owner", "blocks", "bytes", "first_end_unix_ms", "last_end_unix_ms")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_END_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_END_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    owner: str
    blocks: int
    bytes: int
    first_end_unix_ms: int
    last_end_unix_ms: int
    def __init__(self, space_id: _Optional[bytes] = ..., owner: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., first_end_unix_ms: _Optional[int] = ..., last_end_unix_ms: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatsRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("boot_id", "server_version", "uptime_seconds", "tiers", "spaces", "clients", "counters", "misses_blocks", "misses_tokens", "timings", "usage", "leases", "grants", "granted_slots", "stuck_slots", "stuck_bytes", "prefixes", "draining")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MissesBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MissesTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SPACES_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    MISSES_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSES_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STUCK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STUCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    server_version: str
    uptime_seconds: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    spaces: _containers.RepeatedCompositeFieldContainer[SpaceInfo]
    clients: _containers.RepeatedCompositeFieldContainer[ClientStats]
    counters: _containers.ScalarMap[str, int]
    misses_blocks: _containers.ScalarMap[str, int]
    misses_tokens: _containers.ScalarMap[str, int]
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    usage: Usage
    leases: int
    grants: int
    granted_slots: int
    stuck_slots: int
    stuck_bytes: int
    prefixes: _containers.RepeatedCompositeFieldContainer[HotPrefix]
    draining: bool
    def __init__(self, boot_id: _Optional[bytes] = ..., server_version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., spaces: _Optional[_Iterable[_Union[SpaceInfo, _Mapping]]] = ..., clients: _Optional[_Iterable[_Union[ClientStats, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., misses_blocks: _Optional[_Mapping[str, int]] = ..., misses_tokens: _Optional[_Mapping[str, int]] = ..., timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., leases: _Optional[int] = ..., grants: _Optional[int] = ..., granted_slots: _Optional[int] = ..., stuck_slots: _Optional[int] = ..., stuck_bytes: _Optional[int] = ..., prefixes: _Optional[_Iterable[_Union[HotPrefix, _Mapping]]] = ..., draining: bool = ...) -> None: ...

class HotPrefix(_message.Message):
    __slots__ = ("space_id", "root", "key", "requests", "hit_blocks", "hit_tokens", "shared_blocks", "shared_tokens", "shared_bytes", "blocks_gpu", "blocks_host", "blocks_disk", "idle_seconds")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_GPU_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HOST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DISK_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    root: bytes
    key: bytes
    requests: int
    hit_blocks: int
    hit_tokens: int
    shared_blocks: int
    shared_tokens: int
    shared_bytes: int
    blocks_gpu: int
    blocks_host: int
    blocks_disk: int
    idle_seconds: float
    def __init__(self, space_id: _Optional[bytes] = ..., root: _Optional[bytes] = ..., key: _Optional[bytes] = ..., requests: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., blocks_gpu: _Optional[int] = ..., blocks_host: _Optional[int] = ..., blocks_disk: _Optional[int] = ..., idle_seconds: _Optional[float] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "allocated_bytes", "blocks", "free_blocks", "hit_blocks", "hit_tokens", "dirty_blocks", "evicted_blocks", "read_bytes", "written_bytes", "io_errors", "corrupt_blocks", "state", "io_engine", "budget_bytes", "budget_left_bytes", "devices")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIRTY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    IO_ERRORS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IO_ENGINE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    capacity_bytes: int
    used_bytes: int
    allocated_bytes: int
    blocks: int
    free_blocks: int
    hit_blocks: int
    hit_tokens: int
    dirty_blocks: int
    evicted_blocks: int
    read_bytes: int
    written_bytes: int
    io_errors: int
    corrupt_blocks: int
    state: str
    io_engine: str
    budget_bytes: int
    budget_left_bytes: int
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStats]
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., dirty_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., io_errors: _Optional[int] = ..., corrupt_blocks: _Optional[int] = ..., state: _Optional[str] = ..., io_engine: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., budget_left_bytes: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[DeviceStats, _Mapping]]] = ...) -> None: ...

class DeviceStats(_message.Message):
    __slots__ = ("uuid", "name", "capacity_bytes", "allocated_bytes")
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    name: str
    capacity_bytes: int
    allocated_bytes: int
    def __init__(self, uuid: _Optional[str] = ..., name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ...) -> None: ...

class ClientStats(_message.Message):
    __slots__ = ("attachment_id", "client", "pid", "state", "leases", "leased_bytes", "granted_slots", "granted_bytes")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    attachment_id: int
    client: str
    pid: int
    state: str
    leases: int
    leased_bytes: int
    granted_slots: int
    granted_bytes: int
    def __init__(self, attachment_id: _Optional[int] = ..., client: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., leases: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., granted_slots: _Optional[int] = ..., granted_bytes: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("name", "count", "p50_seconds", "p95_seconds", "p99_seconds", "max_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P95_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float
    max_seconds: float
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ..., p50_seconds: _Optional[float] = ..., p95_seconds: _Optional[float] = ..., p99_seconds: _Optional[float] = ..., max_seconds: _Optional[float] = ...) -> None: ...
