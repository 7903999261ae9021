"""kvstore: a hierarchical KV-cache store for LLM inference."""

__version__ = "0.1.0"
