"""Parts that schemas are made of, and messages of the contract as `--json` prints them."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Schema = dict[str, Any]

ANY_INTEGER: Final[Schema] = {"type": "integer"}
INTEGER: Final[Schema] = {"type": "integer", "minimum": 0}
NUMBER: Final[Schema] = {"type": "number"}
TEXT: Final[Schema] = {"type": "string"}
TRUTH: Final[Schema] = {"type": "boolean"}
HEXADECIMAL: Final[Schema] = {"type": "string", "pattern": "^([0-9a-f]{2})*$"}

_MESSAGE: Final = re.compile(r"^message (\w+) \{$")
_FIELD: Final = re.compile(
    r"^  (?:repeated |optional )?(?:map<[^>]+>|\w+) (\w+) = \d+;(\s*// (.*))?$"
)
_NOTE: Final = re.compile(r"^(\s*)// (.*)$")


def described(schema: Schema, text: str) -> Schema:
    """Return a schema with a description."""
    return {**copy.deepcopy(schema), "description": text} if text else copy.deepcopy(schema)


def nullable(schema: Schema) -> Schema:
    """Return a schema that allows null, too."""
    if "type" in schema and isinstance(schema["type"], str):
        return {**copy.deepcopy(schema), "type": [schema["type"], "null"]}
    return {"anyOf": [copy.deepcopy(schema), {"type": "null"}]}


def several(schema: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": copy.deepcopy(schema)}


def one_of(*names: str) -> Schema:
    """Return the schema of one of some words."""
    return {"type": "string", "enum": list(names)}


def counts() -> Schema:
    """Return the schema of numbers by name."""
    return {"type": "object", "additionalProperties": dict(INTEGER)}


def record(description: str = "", /, **fields: tuple[Schema, str]) -> Schema:
    """Return the schema of an object that has all these fields, each with what it means."""
    schema: Schema = {
        "type": "object",
        "properties": {name: described(kind, text) for name, (kind, text) in fields.items()},
        "required": list(fields),
    }
    return described(schema, description)


def with_fields(schema: Schema, **fields: tuple[Schema, str]) -> Schema:
    """Return the schema of an object with some more fields, all of them there."""
    more = record(**fields)
    result = copy.deepcopy(schema)
    result["properties"].update(more["properties"])
    result["required"] += [name for name in fields if name not in result["required"]]
    return result


def without(schema: Schema, name: str) -> Schema:
    """Return the schema of an object with one field less."""
    result = copy.deepcopy(schema)
    del result["properties"][name]
    result["required"].remove(name)
    return result


class Contract:
    """The contract's messages, with the comments of their fields."""

    def __init__(self, proto: Path) -> None:
        """Read `kvstore.proto`."""
        self._notes = dict(_notes(proto.read_text(encoding="utf-8").splitlines()))

    def message(self, descriptor: Any, description: str = "") -> Schema:
        """Return the schema of a message as `kvstore.cli.plain` writes it: every field is there."""
        fields = {}
        for field in descriptor.fields:
            note = self._notes.get((descriptor.name, field.name), "")
            fields[field.name] = (self._field(field), note)
        return record(description, **fields)

    def _field(self, field: Any) -> Schema:
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            value = self._value(message.fields_by_name["value"])
            return {"type": "object", "additionalProperties": value}
        if field.is_repeated:
            return several(self._value(field))
        optional = message is None and field.has_presence
        return nullable(self._value(field)) if optional else self._value(field)

    def _value(self, field: Any) -> Schema:
        if field.message_type is not None:
            return self.message(field.message_type)
        if field.enum_type is not None:
            prefix = f"{field.enum_type.name.upper()}_"
            return one_of(*(v.name.removeprefix(prefix).lower() for v in field.enum_type.values))
        kinds = {
            field.CPPTYPE_BOOL: TRUTH,
            field.CPPTYPE_DOUBLE: NUMBER,
            field.CPPTYPE_UINT32: INTEGER,
            field.CPPTYPE_UINT64: INTEGER,
            field.CPPTYPE_INT32: ANY_INTEGER,
            field.CPPTYPE_INT64: ANY_INTEGER,
        }
        if field.type == field.TYPE_BYTES:
            return dict(HEXADECIMAL)
        return dict(kinds.get(field.cpp_type, TEXT))


def _notes(lines: list[str]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the comment of each field: behind it, and below that in the same column, or above it."""
    message, above, at = "", list[str](), 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if begun := _MESSAGE.match(line):
            message, above = begun[1], []
        elif field := _FIELD.match(line):
            words = list(above)
            if field[3]:
                words = [field[3]]
                column = line.index("//")
                while at < len(lines) and (note := _NOTE.match(lines[at])):
                    if len(note[1]) != column:
                        break
                    words.append(note[2])
                    at += 1
            above = []
            if words:
                yield (message, field[1]), " ".join(words)
        elif note := _NOTE.match(line):
            above.append(note[2])
        else:
            above = []
