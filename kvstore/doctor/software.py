"""Python and the libraries that kvstore runs on."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Final

from kvstore.doctor.finding import Finding, error, ok, warning

__all__ = ["FLOORS", "check_libraries", "check_python", "read_versions", "this_python"]

# The package's dependencies; a bare checkout has no metadata to read them from.
FLOORS: Final = {
    "grpcio": "1.71.2",
    "protobuf": "5.29.6",
    "grpcio-health-checking": "1.71.2",
    "grpcio-reflection": "1.71.2",
    "lmdb": "1.6",
    "numpy": "1.26",
    "prometheus_client": "0.20",
    "psutil": "5.9",
    "pydantic": "2.7",
    "rich": "13.7",
    "typer": "0.18",
    "xxhash": "3.4",
}
_SHOWN: Final = ("grpcio", "protobuf", "lmdb", "numpy", "xxhash")
_OLDEST_PYTHON: Final = (3, 11)


def read_versions() -> dict[str, str]:
    """Return the version of each dependency that is installed."""
    versions = {}
    for name in FLOORS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 1.26.0rc1 is (1, 26, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def check_python(
    implementation: str, version: tuple[int, int, int], pointer_bits: int
) -> Iterator[Finding]:
    """Judge the interpreter.

    Args:
        implementation: such as ``CPython``.
        version: major, minor, micro.
        pointer_bits: 32 or 64.
    """
    subject = "python"
    name = f"{implementation} {'.'.join(map(str, version))}"
    if version < _OLDEST_PYTHON or pointer_bits < 64:
        yield error(subject, f"{name}, {pointer_bits} bits", "use 64-bit Python 3.11 or newer")
    elif implementation != "CPython":
        yield warning(subject, f"{name} is not tried out", "use CPython")
    else:
        yield ok(subject, f"{name} at {sys.executable or 'an unknown place'}")


def this_python() -> tuple[str, tuple[int, int, int], int]:
    """Return the arguments of `check_python` for this process."""
    return (
        platform.python_implementation(),
        sys.version_info[:3],
        sys.maxsize.bit_length() + 1,
    )


def check_libraries(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Judge the libraries.

    Args:
        versions: of those that are installed, by name.
    """
    subject = "libraries"
    missing = [name for name in FLOORS if name not in versions]
    old = [
        f"{name} {versions[name]} (needs {floor})"
        for name, floor in FLOORS.items()
        if name in versions and _numbers(versions[name]) < _numbers(floor)
    ]
    if missing or old:
        problems = [*(f"{name} is missing" for name in missing), *old]
        names = [*missing, *(entry.split()[0] for entry in old)]
        yield error(
            subject,
            ", ".join(problems),
            "pip install " + " ".join(f"'{name}>={FLOORS[name]}'" for name in names),
        )
    else:
        yield ok(subject, ", ".join(f"{name} {versions[name]}" for name in _SHOWN))
