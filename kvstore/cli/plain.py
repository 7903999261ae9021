"""The daemon's answers as plain values: what `--json` prints and what tables are made of.

One conversion for both, so that a table never shows what the JSON lacks. Unlike protobuf's own
JSON, integers stay integers, bytes are hexadecimal, and enum values are short lower-case names.
"""

from __future__ import annotations

from typing import Any

__all__ = ["plain"]


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        number = field.enum_type.values_by_number.get(value)
        name = str(value) if number is None else number.name
        return name.removeprefix(f"{field.enum_type.name.upper()}_").lower()
    return value.hex() if isinstance(value, bytes) else value


def plain(message: Any) -> dict[str, Any]:
    """Return a message as a dictionary with a value for every field; None for one left out.

    Args:
        message: a protobuf message.
    """
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        optional = field.has_presence and field.message_type is None
        if optional and not message.HasField(field.name):
            result[field.name] = None
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name["value"]
            result[field.name] = {key: _value(entry, value[key]) for key in sorted(value)}
        elif isinstance(value, str | bytes | int | float) or hasattr(value, "DESCRIPTOR"):
            result[field.name] = _value(field, value)
        else:
            result[field.name] = [_value(field, item) for item in value]
    return result
