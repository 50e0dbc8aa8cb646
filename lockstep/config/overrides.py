"""What ``--set`` says: a value as its key reads it, and variables that are taken out again."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from lockstep.config.errors import Violation
from lockstep.config.schema import RunConfig
from lockstep.config.toml_text import KeyPath, dotted
from lockstep.config.tree import Leaf, Tree, find, without


def override_value(key: KeyPath, raw: str) -> Any:
    """The value of ``--set key=raw``: TOML where it parses as TOML, else text; the bare word none is none, but for a
    key that has it as a choice.

    A variable's value is text whatever it looks like, as in a shell: ``01`` stays ``01``, and only quotes are taken
    off.
    """
    if raw.strip() == "none" and not _is_choice(key, "none"):
        return None
    value = _parsed(raw)
    return raw if _is_variable(key) and not isinstance(value, str) else value


def without_unset_variables(tree: Tree, layers: Sequence[Tree]) -> tuple[Tree, list[Violation]]:
    """The merged tree without the variables that are none, and those of them that no layer sets: a misspelt name would
    take nothing out."""
    unset = [path for path in _variables(tree) if _is_none(tree, path)]
    known = {path for layer in layers for path in _variables(layer) if not _is_none(layer, path)}
    wrong = [
        Violation(
            dotted(path),
            "is to be taken out, and nothing sets it",
            f'remove the setting, or write {dotted(path)}="none" if none is its value',
        )
        for path in unset
        if path not in known
    ]
    return without(tree, {dotted(path) for path in unset}), wrong


def _is_variable(key: KeyPath) -> bool:
    return len(key) == 3 and key[0] == "environment"


def _variables(tree: Tree) -> Iterator[KeyPath]:
    section = tree.get("environment")
    for process, table in section.items() if isinstance(section, dict) else ():
        yield from (("environment", process, name) for name in (table if isinstance(table, dict) else ()))


def _is_none(tree: Tree, path: KeyPath) -> bool:
    node = find(tree, path)
    return isinstance(node, Leaf) and node.value is None


def _is_choice(key: KeyPath, word: str) -> bool:
    """Whether ``word`` is one of the values that the key's type spells out."""
    kind: Any = RunConfig
    for name in key:
        found = getattr(kind, "model_fields", {}).get(name)
        kind = None if found is None else found.annotation
    return word in get_args(kind)


def _parsed(raw: str) -> Any:
    try:
        document = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    return document["value"] if document.keys() == {"value"} else raw
