"""Variables in the keys that name files, expanded as a POSIX shell does: ``$NAME``, ``${NAME}``, ``${NAME-default}``,
``${NAME:-default}`` (also where NAME is empty), a leading ``~``; ``\\$`` is a dollar sign. A default may hold variables
of its own. Nothing is run; what else a shell would do with a dollar sign is an error that says what is known here.

    expand("${DAPO:-${DATA:-data}/dapo.jsonl}", {"DATA": "/d"})  →  "/d/dapo.jsonl"

A variable that is not set and has no default is an error: the path would be another file. So is one that is set to
nothing, unless the text says what to do then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from lockstep.config.errors import Violation
from lockstep.config.toml_text import KeyPath, dotted
from lockstep.config.tree import Leaf, Tree

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_DEPTH = 16


class PathTextError(ValueError):
    """A path's text that can't be expanded; the text says which part and what would be right."""


def expand(text: str, environment: Mapping[str, str]) -> str:
    """``text`` with its variables replaced. Raises PathTextError."""
    done, end = _expand(text, 0, environment, inside=0)
    assert end == len(text)
    return done


def escape(path: str) -> str:
    """The text that ``expand`` turns into ``path``, whatever dollar signs it has."""
    return path.replace("$", "\\$")


def with_paths(tree: Tree, environment: Mapping[str, str]) -> tuple[Tree, list[Violation]]:
    """The tree with its paths expanded and absolute, and a violation for each that can't be. A value that a later layer
    has replaced is not looked at."""
    violations: list[Violation] = []
    return _walk(tree, (), environment, violations), violations


def _walk(tree: Tree, path: KeyPath, environment: Mapping[str, str], violations: list[Violation]) -> Tree:
    done: Tree = {}
    for name, node in tree.items():
        here = (*path, name)
        if not isinstance(node, Leaf):
            done[name] = _walk(node, here, environment, violations)
        elif node.folder is not None and isinstance(node.value, str):
            try:
                done[name] = replace(node, value=os.path.abspath(node.folder / expand(node.value, environment)))
            except PathTextError as error:
                way_out = f"set the variable, give a default as in ${{NAME:-data/file}}, or set {dotted(here)}"
                violations.append(Violation(dotted(here), str(error), way_out))
                done[name] = node
        else:
            done[name] = node
    return done


def _expand(text: str, at: int, environment: Mapping[str, str], *, inside: int) -> tuple[str, int]:
    """The expanded text from ``at`` to the end, or to the brace that closes a default, and the place after it."""
    if inside > _MAX_DEPTH:
        raise PathTextError(f"more than {_MAX_DEPTH} defaults within each other")
    parts: list[str] = []
    if text[at : at + 1] == "~" and (text[at + 1 : at + 2] in ("", "/") or (inside and text[at + 1] == "}")):
        parts.append(_home(environment))
        at += 1
    while at < len(text):
        char = text[at]
        if text.startswith("\\$", at):
            parts.append("$")
            at += 2
        elif char == "}" and inside:
            return "".join(parts), at
        elif char == "$":
            part, at = _variable(text, at, environment, inside)
            parts.append(part)
        else:
            parts.append(char)
            at += 1
    if inside:
        raise PathTextError(f'"{text}" opens a ${{ that it does not close')
    return "".join(parts), at


def _variable(text: str, at: int, environment: Mapping[str, str], inside: int) -> tuple[str, int]:
    """The value of the variable whose dollar sign is at ``at``, and the place after it."""
    braces = text[at + 1 : at + 2] == "{"
    found = _NAME.match(text, at + 2 if braces else at + 1)
    if found is None:
        raise PathTextError(f'"{text[at:]}" is no variable: write $NAME, ${{NAME}} or ${{NAME:-default}}, \\$ for a $')
    name, end = found.group(), found.end()
    value = environment.get(name)
    if not braces or text.startswith("}", end):
        return _value(name, value), end + braces
    empty_counts = text.startswith(":-", end)
    if not empty_counts and not text.startswith("-", end):
        raise PathTextError(f'"{text[at:]}": only ${{{name}}}, ${{{name}-default}} and ${{{name}:-default}} are known')
    default, end = _default(
        text, end + 1 + empty_counts, environment, inside, wanted=not value if empty_counts else value is None
    )
    if value is None or (empty_counts and not value):
        return default, end
    return value, end


def _default(text: str, at: int, environment: Mapping[str, str], inside: int, *, wanted: bool) -> tuple[str, int]:
    """The default from ``at``; one that is not wanted is read for its end alone, so its variables need not be set."""
    known: Mapping[str, str] = environment if wanted else _Anything()
    default, end = _expand(text, at, known, inside=inside + 1)
    return default, end + 1


def _value(name: str, value: str | None) -> str:
    if not value:
        how = "is not set" if value is None else "is empty"
        raise PathTextError(f"the variable {name} {how} and there is no default")
    return value


def _home(environment: Mapping[str, str]) -> str:
    home = environment.get("HOME")
    if not home:
        raise PathTextError("~ stands for the variable HOME, which is not set")
    return home


class _Anything(dict[str, str]):
    """An environment in which everything is set."""

    def get(self, key: str, default: object = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "x"
