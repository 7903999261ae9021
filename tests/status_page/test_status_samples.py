"""The ring of samples on a real engine, with a clock that the test moves."""

from __future__ import annotations

import json
from collections.abc import Callable

from engine_world import World, chain, spec_of

from kvstore.engine.counters import UsageCounts
from kvstore.index.space_index import SpaceIndex
from kvstore.server.status_samples import HOUR_SECONDS, SAMPLE_SECONDS, StatusSamples

BOOT = b"\x01" * 16


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_ring_holds_an_hour(make_world: Callable[..., World]) -> None:
    async def story(world: World) -> None:
        clock = Clock()
        samples = StatusSamples(world.engine, BOOT, clock)
        assert samples.answer(-1)["samples"] == []
        for _ in range(1000):
            samples.take()
            clock.now += SAMPLE_SECONDS
        answer = samples.answer(-1)
        at = [sample["at"] for sample in answer["samples"]]
        assert len(at) == HOUR_SECONDS / SAMPLE_SECONDS + 1
        assert at[-1] - at[0] == HOUR_SECONDS
        assert at == sorted(at)
        assert answer["now"]["at"] == 10_000.0
        # A page that has some asks for the rest.
        assert [s["at"] for s in samples.answer(at[-3])["samples"]] == at[-2:]
        assert samples.answer(at[-1])["samples"] == []
        json.dumps(answer)

    make_world().run(story)


def test_what_a_sample_says(make_world: Callable[..., World]) -> None:
    async def story(world: World) -> None:
        clock = Clock()
        engine = world.engine
        samples = StatusSamples(engine, BOOT, clock)
        engine.counters.counts["hit_blocks_host"] = 5
        engine.counters.counts["evictions_inline"] = 3
        engine.counters.miss("EVICTED", 4, 16)
        engine.counters.record("acquire", 0.5)
        spec = spec_of("a secret model")
        engine.index.spaces[spec.fingerprint] = SpaceIndex(spec.fingerprint, spec, 0)
        engine.usage[b"a"] = UsageCounts(prompt_tokens=100, reused_tokens_host=60)
        engine.usage[b"b"] = UsageCounts(prompt_tokens=50, local_tokens=10)
        answer = samples.answer(-1)
        now = answer["now"]
        assert answer["boot_id"] == BOOT.hex()
        assert answer["spaces"] == len(engine.index.spaces) == 2
        tiers = {tier["tier"]: tier for tier in now["tiers"]}
        assert set(tiers) == {"host", "disk"}
        assert tiers["host"]["hit_blocks"] == 5
        assert tiers["host"]["capacity_bytes"] == engine.host.usage().capacity_bytes
        assert now["usage"]["prompt_tokens"] == 150
        assert now["usage"]["local_tokens"] == 10
        assert now["misses_blocks"] == {"evicted": 4}
        assert now["evictions"] == {"background": 0, "inline": 3, "by_request": 0}
        assert answer["prefixes"] == []
        timing = next(timing for timing in answer["timings"] if timing["name"] == "acquire")
        assert timing["p99_seconds"] == 0.5
        # Who may look at the page need not know what is served.
        assert "secret" not in json.dumps(answer)

        keys = chain("a prompt", 3)
        await world.player().put(keys)
        world.engine.start_read(world.space, keys).close()
        clock.now += 1.0
        answer = samples.answer(-1)
        (prefix,) = answer["prefixes"]
        assert (prefix["shared_tokens"], prefix["hit_tokens"], prefix["requests"]) == (48, 48, 1)
        assert prefix["blocks"]["host"] == 3
        assert not any(key.hex() in json.dumps(answer) for key in keys)
        now = answer["now"]

        # Many pages look, the daemon looks once a second.
        engine.counters.counts["hit_blocks_host"] = 6
        assert samples.answer(-1)["now"] is now
        clock.now += 1.0
        later = samples.answer(-1)["now"]
        assert later["tiers"][0]["hit_blocks"] == 6
        del engine.index.spaces[spec.fingerprint]
        engine.usage.clear()

    make_world().run(story)


def test_the_thread_takes_the_first_sample_at_once_and_ends(
    make_world: Callable[..., World], until: Callable[..., None]
) -> None:
    async def story(world: World) -> None:
        samples = StatusSamples(world.engine, BOOT)
        samples.start()
        until(lambda: samples.answer(-1)["samples"])
        samples.close()
        assert not samples._thread.is_alive()

    make_world().run(story)
