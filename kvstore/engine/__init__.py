"""The daemon's state and what moves in it, without the network."""

from kvstore.engine.engine import Engine

__all__ = ["Engine"]
