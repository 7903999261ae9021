"""Connectors: inference engines that load from and store to kvstore."""
