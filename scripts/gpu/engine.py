"""A vLLM engine in a process of its own, driven by JSON lines. Started by `compare.py`.

The first line on standard input configures it; each further line is one operation, answered by one
line on standard output. Prompts are random token ids made from a seed, so that several engines can
be given the same ones and no tokenizer is needed. Nothing here knows which connector is in use.

Every time is taken in this process, from handing a prompt to the engine until the step that
returns the token.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
import time
from typing import IO, Any

# A reset is refused while blocks are held, by stores that are still on their way for example.
_RESET_TRIES = 200


class Engine:
    """One engine, and what can be asked of it: the methods whose names begin with `do_`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Start it; takes tens of seconds."""
        from vllm import LLM, SamplingParams

        transfer = settings["transfer"]
        if transfer is not None:
            from vllm.config import KVTransferConfig

            transfer = KVTransferConfig(**transfer)
        self._sampling: Any = SamplingParams
        self._vocabulary = settings["vocabulary"]
        self._count = 0
        begin = time.perf_counter()
        self._llm: Any = LLM(
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=transfer,
            **settings["engine"],
        )
        self.start_seconds = time.perf_counter() - begin
        self._engine = self._llm.llm_engine

    def _prompts(self, seed: int, count: int, tokens: int) -> list[list[int]]:
        draw = random.Random(seed)
        top = self._vocabulary - 1000
        return [[draw.randrange(1000, top) for _ in range(tokens)] for _ in range(count)]

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._count += 1
        name = f"bench-{self._count}"
        parameters = self._sampling(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        return name

    def _run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, dict[str, Any]]:
        """Run requests together; by name: times of their tokens, tokens, cached tokens."""
        begin = time.perf_counter()
        found: dict[str, dict[str, Any]] = {
            self._add(prompt, max_tokens): {"at": [], "tokens": [], "cached": 0}
            for prompt in prompts
        }
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                one = found[output.request_id]
                one["tokens"] = list(output.outputs[0].token_ids)
                one["at"].append((time.perf_counter() - begin) * 1e3)
                one["cached"] = output.num_cached_tokens or 0
        return found

    def _counters(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for metric in self._llm.get_metrics():
            for name in ("external_prefix_cache_hits", "prefix_cache_hits", "num_preemptions"):
                if metric.name in (f"vllm:{name}", f"vllm:{name}_total"):
                    found[name] = found.get(name, 0) + int(metric.value)
        return found

    def do_counters(self) -> dict[str, Any]:
        """Tokens that were found outside and inside of the engine so far, preemptions."""
        return self._counters()

    def do_ttft(self, seed: int, count: int, tokens: int, max_tokens: int = 1) -> dict[str, Any]:
        """One prompt after the other."""
        milliseconds, first, cached = [], [], []
        for prompt in self._prompts(seed, count, tokens):
            (one,) = self._run([prompt], max_tokens).values()
            milliseconds.append(one["at"][0])
            first.append(one["tokens"])
            cached.append(one["cached"])
        return {"ms": milliseconds, "tokens": first, "cached": cached}

    def do_together(self, seed: int, count: int, tokens: int) -> dict[str, Any]:
        """All prompts at once: until the last first token."""
        found = self._run(self._prompts(seed, count, tokens), 1)
        return {
            "ms": max(one["at"][0] for one in found.values()),
            "cached": [one["cached"] for one in found.values()],
        }

    def do_decode(self, seed: int, count: int, tokens: int, max_tokens: int) -> dict[str, Any]:
        """Times between the steps of a batch that decodes, without those that still prefill."""
        found = self._run(self._prompts(seed, count, tokens), max_tokens)
        begin = max(one["at"][0] for one in found.values())
        steps = sorted({at for one in found.values() for at in one["at"] if at >= begin})
        # Requests of one step are microseconds apart.
        gaps = [late - early for early, late in itertools.pairwise(steps)]
        return {"ms": [gap for gap in gaps if gap > 0.5]}

    def do_tails(self, seed: int, tokens: int, tail: int) -> dict[str, Any]:
        """Two prompts that differ in everything but their last tokens."""
        one, other = self._prompts(seed, 2, tokens)
        other = other[:-tail] + one[-tail:]
        return {"tokens": [self._only([prompt]) for prompt in (one, other)]}

    def _only(self, prompts: list[list[int]]) -> list[int]:
        (found,) = self._run(prompts, 32).values()
        return list(found["tokens"])

    def do_reset(self) -> dict[str, Any]:
        """Empty the engine's own cache; what is found afterwards comes from outside."""
        for turn in range(_RESET_TRIES):
            if self._llm.reset_prefix_cache():
                return {"tries": turn + 1}
            self._run(self._prompts(10_000_000 + turn, 1, 16), 1)  # the engine only moves in steps
            time.sleep(0.05)
        raise RuntimeError("the engine's prefix cache could not be reset")

    def do_switch(self, on: bool) -> dict[str, Any]:
        """Turn the connector on or off inside the running engine."""
        from kvstore.connectors.vllm.control import set_enabled

        set_enabled(self._llm, on)
        return {"on": on}

    def _storm_prompts(self, seed: int, count: int, bases: int, longest: int) -> list[list[int]]:
        draw = random.Random(seed)
        roots = self._prompts(seed, bases, longest)
        return [
            draw.choice(roots)[: draw.randrange(longest // 8, longest)]
            + self._prompts(draw.randrange(1 << 30), 1, draw.randrange(8, 200))[0]
            for _ in range(count)
        ]

    def do_alone(
        self, seed: int, count: int, bases: int, longest: int, max_tokens: int, which: list[int]
    ) -> dict[str, Any]:
        """Some requests of a storm, one after the other, each without anything cached."""
        prompts = self._storm_prompts(seed, count, bases, longest)
        tokens = {}
        for index in which:
            self._llm.reset_prefix_cache()
            (one,) = self._run([prompts[index]], max_tokens).values()
            tokens[str(index)] = one["tokens"]
        return {"tokens": tokens}

    def do_storm(
        self,
        seed: int,
        count: int,
        bases: int,
        longest: int,
        max_tokens: int,
        abort: float,
        pace: int,
        preempt: float = 0.0,
    ) -> dict[str, Any]:
        """Requests that share prefixes, arriving and being aborted at random.

        Args:
            seed: decides what is asked for.
            pace: decides when requests arrive and which are aborted.
            count: requests.
            bases: different prefixes.
            longest: tokens of the longest prefix.
            max_tokens: to generate for each.
            abort: chance of each to be aborted.
            preempt: chance of each step that all running requests are preempted after it, and
                the engine's own cache emptied.
        """
        prompts = self._storm_prompts(seed, count, bases, longest)
        draw = random.Random(pace)
        # A stream of its own: other storms arrive as they did without it.
        threat = random.Random(pace + 1)
        todo = [(prompt, draw.random() < abort, draw.randrange(1, 12)) for prompt in prompts]
        before = self._counters()
        names: dict[str, int] = {}
        doomed: dict[str, int] = {}
        tokens: dict[int, list[int]] = {}
        cached: dict[int, int] = {}
        aborted = at = 0
        while at < count or self._engine.has_unfinished_requests():
            for _ in range(draw.randrange(4)):
                if at < count:
                    prompt, abort_it, after = todo[at]
                    name = self._add(prompt, max_tokens)
                    names[name] = at
                    if abort_it:
                        doomed[name] = after
                    at += 1
            for output in self._engine.step():
                index = names.get(output.request_id)
                if output.finished and index is not None:
                    tokens[index] = list(output.outputs[0].token_ids)
                    cached[index] = output.num_cached_tokens or 0
                    doomed.pop(output.request_id, None)
            due = [name for name, left in doomed.items() if left <= 0]
            for name in due:
                del doomed[name]
                self._engine.abort_request([name])
                aborted += 1
            doomed = {name: left - 1 for name, left in doomed.items()}
            if threat.random() < preempt:
                # They are preempted all the same where the cache cannot be emptied, because
                # requests wait for a load.
                with contextlib.suppress(Exception):
                    self._llm.reset_prefix_cache(reset_running_requests=True)
        after_all = self._counters()
        return {
            "tokens": {str(index): found for index, found in sorted(tokens.items())},
            "cached_by_request": {str(index): found for index, found in sorted(cached.items())},
            "aborted": aborted,
            "cached": sum(cached.values()),
            **{
                name: after_all.get(name, 0) - before.get(name, 0)
                for name in ("external_prefix_cache_hits", "num_preemptions")
            },
        }


def _serve(answers: IO[str]) -> None:
    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    settings = sys.stdin.readline()
    if not settings:
        return
    engine = Engine(json.loads(settings))
    answer({"start_seconds": engine.start_seconds})
    for line in sys.stdin:
        request = json.loads(line)
        operation = getattr(engine, f"do_{request.pop('do')}")
        try:
            answer(operation(**request))
        except Exception as error:  # noqa: BLE001 - the process's boundary: the caller decides
            answer({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Serve until standard input ends."""
    # vLLM prints to standard output: keep the real one for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _serve(answers)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
