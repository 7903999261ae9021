"""The `kvstore` command."""

from kvstore.cli.app import main

__all__ = ["main"]
