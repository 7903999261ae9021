"""Why prompts share less of their prefix than they could, from the prompts alone.

A prefix cache computes each distinct prefix once: what is left to compute of a set of prompts is
the size of their prefix tree. So the gain of a change is the size of the tree before it minus the
size after it, and that is how everything here is weighed.

1. `prompts` reads lines and renders chats as one text, remembering which field is where.
2. `analysis` walks the tree from the root. Where prompts part it asks the `culprits`, cheapest
   first, for something that varies while what follows is the same; what is found is taken out of
   the way (moved to the end, or written the same way everywhere), if that makes the tree smaller,
   and the walk goes on from there. Otherwise it goes down each branch.
3. `report` is what came of it, with places in the prompts as they were given.

Pure functions of the file; nothing is kept.
"""

from kvstore.explain.analysis import analyse
from kvstore.explain.prompts import Prompt, read_prompts
from kvstore.explain.report import Finding, Group, Kind, Report
from kvstore.explain.tokens import CHARS_PER_TOKEN, measured_chars_per_token

__all__ = [
    "CHARS_PER_TOKEN",
    "Finding",
    "Group",
    "Kind",
    "Prompt",
    "Report",
    "analyse",
    "measured_chars_per_token",
    "read_prompts",
]
