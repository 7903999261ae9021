"""What every test runs under."""

from hypothesis import settings

# Repeatable, and without per-example deadlines: CI machines are shared and slow at times.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
