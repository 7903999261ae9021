"""What became of requests: the daemon cannot see engine-local hits or failed loads."""

from __future__ import annotations

from kvstore.connectors.vllm.stats import StatsLog
from kvstore.connectors.vllm.store import Client, Space
from kvstore.connectors.vllm.tracks import Track

__all__ = ["Usage"]

_GPU: int = 1
_DISK: int = 3


class Usage:
    """Reports to the daemon, through the client's heartbeats, and to vLLM's metrics."""

    def __init__(self, client: Client, stats: StatsLog) -> None:
        """Report to this client's daemon, and count in `stats`."""
        self._client = client
        self._stats = stats

    @staticmethod
    def _space(track: Track) -> Space | None:
        return track.view.space() if track.view is not None else None

    def count(self, track: Track) -> None:
        """A request has got its blocks; count it the first time."""
        space = self._space(track)
        if track.counted or space is None:
            return
        track.counted = True
        prompt_tokens = int(track.request.num_prompt_tokens)
        self._client.report_usage(
            space, requests=1, prompt_tokens=prompt_tokens, local_tokens=track.local_tokens
        )
        self._stats.count("requests")
        self._stats.count("prompt_tokens", prompt_tokens)
        self._stats.count("local_tokens", track.local_tokens)

    def loaded(self, track: Track, tier_tokens: dict[int, int]) -> None:
        """A load has succeeded."""
        space = self._space(track)
        if space is not None:
            gpu, disk = tier_tokens.get(_GPU, 0), tier_tokens.get(_DISK, 0)
            host = sum(tier_tokens.values()) - gpu - disk
            self._client.report_usage(
                space, reused_tokens_gpu=gpu, reused_tokens_host=host, reused_tokens_disk=disk
            )
            for tier, tokens in (("gpu", gpu), ("host", host), ("disk", disk)):
                self._stats.count(f"hit_tokens/{tier}", tokens)

    def load_failed(self, track: Track) -> None:
        """A load has failed and was reported so."""
        space = self._space(track)
        if space is not None:
            self._client.report_usage(space, load_failures=1)
            self._stats.count("load_failures")

    def moved(self, space: Space | None, loaded_bytes: int, stored_bytes: int) -> None:
        """Workers have moved bytes."""
        if space is not None and (loaded_bytes or stored_bytes):
            self._client.report_usage(space, loaded_bytes=loaded_bytes, stored_bytes=stored_bytes)
