"""How many characters make a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.explain.prompts import Prompt

__all__ = ["CHARS_PER_TOKEN", "measured_chars_per_token"]

# Without a tokenizer: about right for English and for code.
CHARS_PER_TOKEN: Final = 4.0
_SAMPLE: Final = 200


def measured_chars_per_token(prompts: Sequence[Prompt], tokenizer: Path) -> float:
    """Return the mean over some of the prompts.

    Args:
        prompts: not empty.
        tokenizer: a ``tokenizer.json``, or the directory of a model that has one.

    Raises:
        ConfigError: the package `tokenizers` is not installed.
        InvalidRequest: the file is no tokenizer.
    """
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise InvalidRequest("tokenizer", f"{path}: no such file")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("tokenizer: needs a package: pip install tokenizers") from error
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise InvalidRequest("tokenizer", f"{path}: {error}") from error
    sample = prompts[:: max(1, len(prompts) // _SAMPLE)]
    tokens = sum(len(loaded.encode(prompt.text).ids) for prompt in sample)
    return sum(len(prompt.text) for prompt in sample) / max(1, tokens)
