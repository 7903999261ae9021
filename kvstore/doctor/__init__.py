"""Checks of the machine that a daemon runs on: what was seen, and what to do about it.

Daemon and command line share them, so nothing here knows gRPC, settings or tiers. Each module has
functions that look (system calls, files of the kernel) and functions that judge what was seen;
`examination` puts them in order.
"""

from kvstore.doctor.examination import Examination
from kvstore.doctor.finding import Finding, Level
from kvstore.doctor.setup import Setup

__all__ = ["Examination", "Finding", "Level", "Setup"]
