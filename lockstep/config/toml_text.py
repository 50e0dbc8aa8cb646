"""TOML text both ways: the line of each value that a file sets, and a writer for plain values.

The standard library reads TOML but keeps no positions and writes nothing; both needs here are small.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

KeyPath = tuple[str, ...]
"""A key as its parts: ``("trainer", "learning_rate")``."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dotted(path: KeyPath) -> str:
    """``("a", "b c")`` as TOML writes it: ``a."b c"``."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else format_string(part) for part in path)


def split_dotted(key: str) -> KeyPath:
    """The parts of a dotted TOML key. Raises ``ValueError`` when it is none."""
    if "\n" in key or "=" in re.sub(r'"(\\.|[^"\\])*"|\'[^\']*\'', "", key):
        raise ValueError(f"{key!r} is not a key")
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{key!r} is not a key: {error}") from error
    path: list[str] = []
    while isinstance(node, dict):
        ((part, node),) = node.items()
        path.append(part)
    return tuple(path)


def leaves(node: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Paths of all values of nested dicts. Lists and empty dicts are values."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def value_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) on which each value of a valid TOML text is set.

    A statement is the shortest run of lines that parses by itself, which is exact: no prefix of a TOML statement is
    one. Elements of an array of tables belong to the array, whose line is that of its first header.
    """
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    pending: list[str] = []
    start = 1
    in_array = False
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not pending:
            start = number
        pending.append(line)
        statement = "\n".join(pending)
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        pending = []
        if statement.lstrip().startswith("["):
            table = next(leaves(parsed))
            in_array = statement.lstrip().startswith("[[")
            if in_array:
                found.setdefault(table, start)
            continue
        for path in leaves(parsed):
            if path and not in_array:
                found.setdefault((*table, *path), start)
    return found


def format_string(text: str) -> str:
    """A TOML basic string. Raises ``ValueError`` for lone surrogates, which no UTF-8 file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text is not valid Unicode: {text!a}") from error
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_value(value: Any) -> str:
    """A TOML value on one line; dicts become inline tables. Raises ``ValueError`` for what TOML can't say (None)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return format_string(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        if not value:
            return "{}"
        return "{ " + ", ".join(f"{dotted((key,))} = {format_value(item)}" for key, item in value.items()) + " }"
    raise ValueError(f"TOML has no way to write {value!r} of type {type(value).__name__}")
