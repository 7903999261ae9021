"""Which engines share blocks: any difference that matters is another space."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_store import SLOT

from kvstore.connectors.vllm import space as spaces
from kvstore.connectors.vllm.metadata import Load, StepMeta, Store, WorkerInfo, WorkerReport
from kvstore.connectors.vllm.roster import Roster
from kvstore.connectors.vllm.settings import Settings
from kvstore.connectors.vllm.space import EngineShape, describe_engine, space_spec
from kvstore.connectors.vllm.weights import Adapters
from kvstore.errors import ConfigError


class FullAttentionSpec:
    """Named like vLLM's: the connector tells kinds by the names of classes."""

    block_size = 32
    num_kv_heads = 1
    page_size_bytes = 100


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec:
    block_size = 32


class MambaSpec:
    block_size = 32


class NonCausalSpec(FullAttentionSpec):
    non_causal = True


class RSWASpec(FullAttentionSpec):
    """Drops blocks from the middle of what it has generated."""


class HfConfig:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return self.fields


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(range(256)) * 2000)
    return tmp_path / "model"


def config(
    checkpoint: Path,
    *,
    kv_heads: int = 1,
    mla: bool = False,
    hf: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **fields}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(
            block_size=32,
            cache_dtype=fields.get("cache_dtype", "auto"),
            prefix_caching_hash_algo="sha256_cbor",
            enable_prefix_caching=True,
            calculate_kv_scales=fields.get("scales", False),
        ),
        model_config=SimpleNamespace(
            model=str(checkpoint),
            dtype="torch.bfloat16",
            use_mla=mla,
            hf_config=HfConfig(**(hf or {"rope_theta": 1})),
            quantization=fields.get("quantization"),
            multimodal_config=SimpleNamespace(mm_processor_kwargs=fields.get("images")),
            max_model_len=fields.get("max_model_len", 1024),
            is_prefix_caching_supported=fields.get("prefixes", True),
            get_total_num_kv_heads=lambda: kv_heads,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=fields.get("speculative"),
    )


def cache(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=s) for s in specs or (FullAttentionSpec(),)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=7)


def shape(checkpoint: Path, *, settings: Settings | None = None, **fields: Any) -> EngineShape:
    return describe_engine(config(checkpoint, **fields), cache(), settings or Settings())


def name(engine: EngineShape, **fields: Any) -> bytes:
    settings = fields.pop("settings", Settings())
    chosen: dict[str, Any] = {"layout": "l", "shard_bytes": (4096,), "seed": "ab" * 32}
    return space_spec(engine, settings, **(chosen | fields)).fingerprint


def test_any_difference_is_another_space(checkpoint: Path) -> None:
    base = shape(checkpoint)
    assert not base.refusal
    names = [
        name(base),
        name(shape(checkpoint, hf={"rope_theta": 2})),
        name(shape(checkpoint, cache_dtype="fp8")),
        name(shape(checkpoint, settings=Settings(block_tokens=64))),
        name(shape(checkpoint, settings=Settings(weights_version="v2"))),
        name(shape(checkpoint, settings=Settings(model="other"))),
        name(shape(checkpoint, tensor_parallel_size=2)),
        name(base, layout="m"),
        name(base, shard_bytes=(8192,)),
        name(base, seed="cd" * 32),
        name(base, view="1"),
        name(base, adapter="lora a"),
        name(base, settings=Settings(tenant="t")),
        name(base, settings=Settings(tenant="t"), view="1"),
    ]
    assert len(set(names)) == len(names)
    assert name(shape(checkpoint)) == names[0]


def test_weights_changed_in_place_are_another_space(checkpoint: Path) -> None:
    before = name(shape(checkpoint))
    weights = checkpoint / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    for at in range(0, len(changed), 1000):
        changed[at] ^= 1
    weights.write_bytes(changed)
    assert name(shape(checkpoint)) != before


def test_a_name_for_the_weights_does_not_stand_for_their_configuration(checkpoint: Path) -> None:
    named = Settings(weights_version="v1")
    names = [
        name(shape(checkpoint, settings=named, **fields), settings=named)
        for fields in ({}, {"hf": {"rope_theta": 2}}, {"quantization": "fp8"})
    ]
    assert len(set(names)) == 3


def test_how_images_are_read_is_told_apart(checkpoint: Path) -> None:
    """vLLM's hash of an image does not cover how the engine was told to read images."""
    names = [name(shape(checkpoint, images=images)) for images in (None, {"max_pixels": 1024})]
    (checkpoint / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0]}')
    names.append(name(shape(checkpoint)))
    assert len(set(names)) == 3


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_rotary_embeddings_chosen_by_the_longest_context_are_told_apart(
    checkpoint: Path, rope: str
) -> None:
    """vLLM takes long factors for all positions, or for none: by max_model_len."""
    scaled: dict[str, Any] = {"hf": {"rope_parameters": {"rope_type": rope}}}
    short, long = (shape(checkpoint, **scaled, max_model_len=n) for n in (512, 1024))
    assert name(short) != name(long)
    other: dict[str, Any] = {"hf": {"quantization_config": {"activation_scheme": "dynamic"}}}
    short, long = (shape(checkpoint, **other, max_model_len=n) for n in (512, 1024))
    assert name(short) == name(long)


def test_drafts_of_another_model_are_another_space(checkpoint: Path, tmp_path: Path) -> None:
    names = []
    for i in range(2):
        draft = tmp_path / f"draft{i}"
        draft.mkdir()
        (draft / "model.safetensors").write_bytes(bytes([i]) * 999)
        model = SimpleNamespace(model=str(draft))
        engine = shape(checkpoint, speculative=SimpleNamespace(draft_model_config=model))
        names.append(name(engine))
    same = SimpleNamespace(draft_model_config=SimpleNamespace(model=str(checkpoint)))  # n-grams
    names.append(name(shape(checkpoint, speculative=same)))
    assert len(set(names)) == 3
    assert names[2] == name(shape(checkpoint))


def test_a_checkpoint_that_differs_in_one_small_tensor_is_another_space(checkpoint: Path) -> None:
    """Adapters merged into the values of a few layers, say."""
    part = 128 << 10
    # Between two of 64 pages that are spread over the file.
    begin, end, size = 40 * part + part // 4, 40 * part + part // 2, 64 * part
    offsets = {"a": [0, begin], "b": [begin, end], "c": [end, size]}
    tensors = {
        name_: {"dtype": "U8", "shape": [to - at], "data_offsets": [at, to]}
        for name_, (at, to) in offsets.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    names = []
    for filled in (b"\1", b"\2"):
        body = bytes(begin) + filled * (end - begin) + bytes(size - end)
        data = len(header).to_bytes(8, "little") + header + body
        (checkpoint / "model.safetensors").write_bytes(data)
        names.append(name(shape(checkpoint)))
    assert names[0] != names[1]


@pytest.mark.parametrize(
    "head", [b"", b"\xff" * 8, (9).to_bytes(8, "little") + b'{"a": 1} ', bytes(8), b"\7"]
)
def test_a_file_that_is_no_safetensors_file_is_sampled_all_the_same(
    checkpoint: Path, head: bytes
) -> None:
    names = []
    for fill in (b"\1", b"\2"):
        (checkpoint / "model.safetensors").write_bytes(head + fill * 300_000)
        names.append(name(shape(checkpoint)))
    assert names[0] != names[1]


def test_the_same_weights_elsewhere_are_the_same_space(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "model"
    copy.mkdir(parents=True)
    (copy / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    assert name(shape(copy)) == name(shape(checkpoint))


def test_weights_that_cannot_be_found_must_be_named(tmp_path: Path) -> None:
    missing = tmp_path / "org" / "not-here"
    assert "weights_version" in shape(missing).refusal
    assert not shape(missing, settings=Settings(weights_version="v1")).refusal


def adapter(directory: Path, fill: int = 0) -> Any:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(bytes([fill]) * 999)
    return SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(directory))


def test_adapters_of_one_name_are_told_apart_by_their_files(tmp_path: Path) -> None:
    made = [Adapters().identity(adapter(tmp_path / str(i), i)) for i in range(2)]
    assert made[0] != made[1]
    assert Adapters().identity(None) == ""


def test_adapters_that_differ_in_their_scale_only_are_told_apart(tmp_path: Path) -> None:
    request, made = adapter(tmp_path / "a"), []
    for alpha in (16, 32):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        made.append(Adapters().identity(request))
    assert None not in made
    assert made[0] != made[1]


def test_an_adapter_without_weights_is_not_shared(tmp_path: Path) -> None:
    request = adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    adapters = Adapters()
    assert adapters.identity(request) is None
    adapter(tmp_path / "a")
    assert adapters.identity(request)
    request.lora_path = str(tmp_path / "a" / "adapter_config.json")
    assert adapters.identity(request) is None
    request.lora_path = "org/adapter-that-is-not-here"
    assert adapters.identity(request) is None


def test_an_adapter_whose_files_change_under_it_is_not_shared(tmp_path: Path) -> None:
    """The engine runs what it read once; or, if it dropped that meanwhile, what is there now."""
    adapters = Adapters()
    request = adapter(tmp_path / "a", 1)
    before = adapters.identity(request)
    assert before
    assert adapters.identity(request) == before
    adapter(tmp_path / "a", 2)
    assert adapters.identity(request) is None
    # Loaded anew, it has another number.
    request.lora_int_id = 2
    assert adapters.identity(request) not in (None, before)
    # Read from its files again and again.
    request.load_inplace = True
    assert adapters.identity(request) is None


@pytest.mark.parametrize(
    ("specs", "fields", "why"),
    [
        (
            (FullAttentionSpec(), SlidingWindowSpec()),
            {},
            "2 KV-cache groups .* --disable-hybrid-kv-cache-manager",
        ),
        ((FullAttentionSpec(), MambaSpec()), {}, "2 KV-cache groups are not supported yet$"),
        ((SlidingWindowSpec(),), {}, "SlidingWindowSpec"),
        ((), {"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ((), {"scales": True}, "calculate_kv_scales"),
        ((NonCausalSpec(),), {}, "later tokens"),
        ((RSWASpec(),), {}, "RSWASpec"),
        ((), {"prefixes": False}, "prefix caching"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    checkpoint: Path, specs: tuple[Any, ...], fields: dict[str, Any], why: str
) -> None:
    found = describe_engine(config(checkpoint, **fields), cache(*specs), Settings())
    assert re.search(why, found.refusal)


def test_an_encoder_that_keeps_no_kv_is_refused(checkpoint: Path) -> None:
    nothing = cache()
    nothing.kv_cache_groups = []
    assert "keeps no KV" in describe_engine(config(checkpoint), nothing, Settings()).refusal


def test_hash_units_other_than_blocks_are_refused(checkpoint: Path) -> None:
    odd = cache()
    odd.hash_block_size = 16
    assert "hashes" in describe_engine(config(checkpoint), odd, Settings()).refusal


@pytest.mark.parametrize(
    ("ranks", "heads", "mla", "shards", "writers"),
    [
        (1, 8, False, 1, [0]),
        (4, 8, False, 4, [0, 1, 2, 3]),
        (4, 2, False, 2, [0, 2]),
        (4, 1, True, 1, [0]),
    ],
)
def test_replicas_store_once(
    checkpoint: Path, ranks: int, heads: int, mla: bool, shards: int, writers: list[int]
) -> None:
    engine = shape(checkpoint, tensor_parallel_size=ranks, kv_heads=heads, mla=mla)
    assert engine.shards == shards
    assert [r for r in range(ranks) if engine.writes(r)] == writers
    assert {engine.shard(0, r) for r in range(ranks)} == set(range(shards))


def test_pipeline_stages_are_shards_of_one_block(checkpoint: Path) -> None:
    engine = shape(checkpoint, tensor_parallel_size=2, pipeline_parallel_size=2, kv_heads=8)
    assert engine.shards == 4
    roster = Roster(engine)
    infos = [
        WorkerInfo(2 * p + t, engine.shard(p, t), 4096 * (p + 1), f"stage {p}")
        for p in range(2)
        for t in range(2)
    ]
    roster.admit(infos)
    assert roster.complete
    assert roster.shard_bytes == (4096, 4096, 8192, 8192)
    infos[3].shard_bytes += 1
    roster.admit(infos)
    assert not roster.complete


def test_each_stage_works_out_what_the_others_store(checkpoint: Path) -> None:
    vllm_config = config(checkpoint, tensor_parallel_size=2, pipeline_parallel_size=3, kv_heads=8)
    vllm_config.model_config.get_num_layers = lambda parallel: (4, 5, 3)[
        parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
    ]
    engine = describe_engine(vllm_config, cache(), Settings(block_tokens=64))
    assert engine.group_blocks == 2
    every = [800, 800, 1000, 1000, 600, 600]
    assert [engine.shard_bytes(*stage) for stage in ((0, 400), (1, 500), (2, 300))] == [every] * 3
    # Its KV cache is not its share of the model's layers: nor need that of others be.
    assert engine.shard_bytes(2, 400) == []
    vllm_config.speculative_config = object()
    engine = describe_engine(vllm_config, cache(), Settings())
    assert engine.shard_bytes(0, 400) == []


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (32, 1), (33, 2), (128, 4), (130, 5)])
def test_stored_blocks_are_whole_engine_blocks(checkpoint: Path, tokens: int, blocks: int) -> None:
    assert shape(checkpoint, settings=Settings(block_tokens=tokens)).group_blocks == blocks


@pytest.mark.parametrize(
    "extra", [{"tennant": "a"}, {"block_tokens": 0}, {"disk_wait_seconds": "soon"}]
)
def test_a_wrong_setting_is_named(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(extra))):
        Settings.parse(extra)


def test_pickled_hashes_are_warned_about(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(spaces, "log_once", lambda level, text, *_: said.append(text))
    odd = config(checkpoint)
    for algorithm in ("sha256", "xxhash"):
        odd.cache_config.prefix_caching_hash_algo = algorithm
        describe_engine(odd, cache(), Settings())
    assert len(said) == 2
    assert all("sha256_cbor" in text for text in said)


def test_keys_are_as_long_as_the_root(checkpoint: Path) -> None:
    engine = shape(checkpoint)
    chosen: dict[str, Any] = {"layout": "l", "shard_bytes": (4096,)}
    assert space_spec(engine, Settings(), seed="ab" * 16, **chosen).key_bytes == 16
    assert space_spec(engine, Settings(), seed="ab" * 32, **chosen).key_bytes == 32


def test_metadata_survives_pickling_and_stays_small(checkpoint: Path) -> None:
    count = 625
    spec = space_spec(shape(checkpoint), Settings(), layout="l", shard_bytes=(1,), seed="ab" * 32)
    slots, blocks = np.zeros(count, SLOT), np.arange(4 * count, dtype=np.int32)
    meta = StepMeta(
        3,
        [Load("r", blocks, 1, slots, b"boot")],
        [
            Store(
                1, spec, b"boot", 7, (8, 9), np.ones(count, np.uint64), slots,
                blocks.reshape(count, 4), bytes(32 * count), bytes(32 * count),
            )
        ],
        blocks,
    )  # fmt: skip
    data = pickle.dumps(meta)
    assert len(data) < 130 * count
    again = pickle.loads(data)
    assert again.stores[0].spec == spec
    assert (again.loads[0].blocks == blocks).all()
    assert (again.handed_out == blocks).all()
    assert again.stores[0].blocks.shape == (count, 4)
    assert json.dumps(again.loads[0].request_id) == '"r"'


def test_reports_of_ranks_add_up() -> None:
    one = WorkerReport({1: [b"\1"]}, [], 10, 1)
    two = WorkerReport({1: [b"\2"], 2: [b"\1"]}, [WorkerInfo(1, 1, 1, "l")], 5, 2)
    both = pickle.loads(pickle.dumps(one)).aggregate(two)
    assert both.stored == {1: [b"\1", b"\2"], 2: [b"\1"]}
    assert (len(both.infos), both.loaded_bytes, both.stored_bytes) == (1, 15, 3)
