"""Reading prompts: texts, or chats rendered as one text."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest

__all__ = ["Place", "Prompt", "read_prompts"]


class NotAPrompt(ValueError):
    """A line is something else."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a prompt as it was given.

    Attributes:
        offset: characters before it in the text that the engine sees, chats as rendered here.
        field: the field it is in, such as ``messages[0].content``.
        field_offset: characters before it in that field; in ``tools`` as JSON with spaces after
            commas and colons.
    """

    offset: int
    field: str
    field_offset: int


@dataclass(slots=True)
class Prompt:
    """One prompt.

    Attributes:
        line: its line in the file, from 1.
        text: the whole prompt.
        starts: where each field begins, ascending.
        fields: their names.
    """

    line: int
    text: str
    starts: list[int] = field(default_factory=lambda: [0])
    fields: list[str] = field(default_factory=lambda: ["prompt"])

    def place(self, offset: int) -> Place:
        """Return which field an offset is in."""
        at = max(0, bisect.bisect_right(self.starts, offset) - 1)
        return Place(offset, self.fields[at], offset - self.starts[at])


class _Renderer:
    """Puts a chat together: tools first, as most templates do, then the messages."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self.starts: list[int] = []
        self.fields: list[str] = []

    def add(self, text: str, name: str = "") -> None:
        if name:
            self.starts.append(self._length)
            self.fields.append(name)
        self._parts.append(text)
        self._length += len(text)

    @property
    def text(self) -> str:
        return "".join(self._parts)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _content(renderer: _Renderer, content: Any, name: str) -> None:
    """Add a message's content.

    Raises:
        NotAPrompt: it is neither text, nor parts, nor absent.
    """
    if content is None:
        return
    if isinstance(content, str):
        renderer.add(content, name)
        return
    if not isinstance(content, list):
        raise NotAPrompt(f"{name}: is neither text nor a list of parts")
    for at, part in enumerate(content):
        if not isinstance(part, dict):
            raise NotAPrompt(f"{name}[{at}]: is no object")
        text = part.get("text")
        if isinstance(text, str):
            renderer.add(text, f"{name}[{at}].text")
        else:
            renderer.add(_dump(part), f"{name}[{at}]")


def _chat(line: int, fields: dict[str, Any]) -> Prompt:
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise NotAPrompt("messages: is no list of messages")
    renderer = _Renderer()
    if fields.get("tools"):
        renderer.add("<|tools|>\n", "template")
        renderer.add(_dump(fields["tools"]), "tools")
        renderer.add("\n", "template")
    for at, message in enumerate(messages):
        name = f"messages[{at}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise NotAPrompt(f"{name}: has no role")
        renderer.add(f"<|{message['role']}|>\n", f"{name}.role")
        _content(renderer, message.get("content"), f"{name}.content")
        if message.get("tool_calls"):
            renderer.add(_dump(message["tool_calls"]), f"{name}.tool_calls")
        renderer.add("\n", "template")
    return Prompt(line, renderer.text, renderer.starts, renderer.fields)


def _prompt(line: int, text: str) -> Prompt:
    """Parse one line.

    Raises:
        NotAPrompt: it is no prompt.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotAPrompt(f"is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise NotAPrompt("is no JSON object")
    if "messages" in fields:
        return _chat(line, fields)
    if not isinstance(fields.get("prompt"), str):
        raise NotAPrompt('has neither a text "prompt" nor a list "messages"')
    return Prompt(line, fields["prompt"])


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest("prompts", f"{path}: {error.strerror}") from error
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line or line.isspace():
            continue
        try:
            yield number, line.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{path}:{number}", "is no UTF-8") from error


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file of prompts, one JSON object a line.

    Raises:
        InvalidRequest: it cannot be read, is empty, or a line is wrong; the message names it.
    """
    prompts = []
    for number, line in _lines(path):
        try:
            prompts.append(_prompt(number, line))
        except NotAPrompt as error:
            raise InvalidRequest(f"{path}:{number}", str(error)) from error
    if not prompts:
        raise InvalidRequest("prompts", f"{path}: holds no prompts")
    return prompts
