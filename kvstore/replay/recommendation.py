"""Which of the sizes that were tried to buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.replay.result import SizeResult
from kvstore.replay.sizes import UNLIMITED

__all__ = ["Prices", "Recommendation", "recommend"]


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per GB (10⁹ bytes), in any currency.

    Attributes:
        host: of memory.
        disk: of SSD.
    """

    host: float = 5.0
    disk: float = 0.1

    def of(self, result: SizeResult) -> float:
        """Return what the tiers of a size cost."""
        return (self.host * result.host_bytes + self.disk * result.size.disk) / 1e9


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The cheapest size that is good enough.

    Attributes:
        choice: that size.
        best: the size with the least mean time to first token.
        price: of the choice.
        best_price: of the best.
        within: how much longer the choice's mean time may be, as a part of the best's.
    """

    choice: SizeResult
    best: SizeResult
    price: float
    best_price: float
    within: float


def recommend(results: Sequence[SizeResult], prices: Prices, within: float) -> Recommendation:
    """Return the cheapest size whose mean time to first token is within a part of the best one's.

    Sizes without a limit cannot be bought, but may be the best.
    """
    best = min(results, key=lambda r: (r.ttft.mean, prices.of(r)))
    limit = best.ttft.mean * (1 + within)
    good = [r for r in results if r.ttft.mean <= limit]
    real = [r for r in good if max(r.host_bytes, r.size.disk) < UNLIMITED]
    choice = min(real or good, key=lambda r: (prices.of(r), r.ttft.mean))
    return Recommendation(choice, best, prices.of(choice), prices.of(best), within)
