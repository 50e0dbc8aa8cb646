"""JSON from untrusted files: bounded, without duplicate keys, without values that JSON doesn't have.

Python's parser keeps the last of two equal keys and others keep the first, so a file with both means different things
to different readers; it also takes NaN and Infinity, which are no JSON.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from lockstep.checkpoint.errors import shown

MAX_DEPTH = 64
"""Whoever walks a parsed value may do so recursively."""


class JsonError(ValueError):
    """Text that is refused as JSON; says why."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    doubled: dict[str, None] = {}
    for key, value in pairs:
        if key in result:
            doubled[key] = None
        result[key] = value
    if doubled:
        raise JsonError(f"{len(doubled)} duplicate keys: {', '.join(shown(key) for key in list(doubled)[:5])}")
    return result


def _no_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is no JSON value")


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``. Raises JsonError for anything else, duplicate keys at any depth included."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except JsonError:
        raise
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise JsonError("nested too deeply") from error
    except ValueError as error:  # malformed, or an integer of thousands of digits
        raise JsonError(f"not JSON: {shown(str(error))}") from error
    if not isinstance(value, dict):
        raise JsonError(f"a JSON {type(value).__name__} where an object is expected")
    if _is_deep(value):
        raise JsonError("nested too deeply")
    return value


def _is_deep(value: dict[str, Any]) -> bool:
    """Whether there is anything below ``MAX_DEPTH`` levels, found level by level."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file that is no link. Raises OSError for a link, a folder, a pipe or a device
    (opening a pipe would wait for its writer for ever)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{shown(path.name)} is no regular file")
    return descriptor


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most ``max_bytes``. Raises JsonError and OSError."""
    with open(open_regular(path), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise JsonError(f"larger than {max_bytes} bytes, which no real one is")
    return parse_object(data)
