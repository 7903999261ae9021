"""The demo's prompts: deterministic prose, the same on every machine and Python version.

Each text is a run of plain sentences drawn from small word lists, so that any number of prompts
of any length can be had, and no two of them share their first block: a text opens with its own
title. Real weights continue it sensibly, which makes equal tokens a meaningful comparison.
"""

from __future__ import annotations

from typing import Final

__all__ = ["text"]

_PLACES: Final = (
    "the harbour",
    "the old observatory",
    "the northern station",
    "the paper mill",
    "the river lock",
    "the botanical garden",
    "the signal tower",
    "the market hall",
    "the salt works",
    "the ferry landing",
    "the map room",
    "the weather office",
)
_PEOPLE: Final = (
    "The keeper",
    "A visiting engineer",
    "The head gardener",
    "An apprentice",
    "The harbour master",
    "A retired surveyor",
    "The night clerk",
    "A young botanist",
    "The ferryman",
    "The librarian",
    "An inspector",
    "The glassblower",
)
_ACTS: Final = (
    "measured the depth of the water",
    "copied the figures into a ledger",
    "repaired the brass fittings",
    "counted the crates by the wall",
    "compared two charts of the coast",
    "wrote a letter to the council",
    "noted the direction of the wind",
    "tested the new lamp",
    "sorted the seeds by colour",
    "checked the pressure twice",
    "drew a plan of the cellar",
    "rewound the clock",
)
_TIMES: Final = (
    "before sunrise",
    "shortly after noon",
    "in the late afternoon",
    "on the first dry day",
    "during the storm",
    "when the tide had turned",
    "at the end of the week",
    "while the others slept",
    "in the third month",
    "as soon as the road was clear",
)
_RESULTS: Final = (
    "and found nothing out of order",
    "which took longer than expected",
    "because the previous record was missing",
    "and was surprised by the result",
    "so that the work could go on",
    "although nobody had asked for it",
    "and left a short note on the desk",
    "until the light began to fail",
    "and returned with three questions",
    "as the rules had always required",
)


class _Draw:
    """A small congruential generator: `random` may change between Python versions.

    Source: constants of Numerical Recipes' 32-bit generator; the high bits are used.
    """

    def __init__(self, seed: int) -> None:
        self._state = (seed * 2_654_435_761 + 1) & 0xFFFF_FFFF

    def __call__(self, choices: tuple[str, ...]) -> str:
        self._state = (self._state * 1_664_525 + 1_013_904_223) & 0xFFFF_FFFF
        return choices[(self._state >> 8) % len(choices)]


def text(number: int, words: int) -> str:
    """Return text `number`, at least `words` words long.

    Args:
        number: which text; any two numbers give texts that differ from the first words on.
        words: least length.
    """
    draw = _Draw(number)
    sentences = [f"Report number {number} of the town chronicle, about {draw(_PLACES)}."]
    count = len(sentences[0].split())
    while count < words:
        sentence = (
            f"{draw(_PEOPLE)} of {draw(_PLACES)} {draw(_ACTS)} {draw(_TIMES)}, {draw(_RESULTS)}."
        )
        sentences.append(sentence)
        count += len(sentence.split())
    return " ".join(sentences)
