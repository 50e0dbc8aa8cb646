"""Layers of configuration as trees whose leaves know their origin: built from TOML or from a ``Section``, merged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.keys import discriminator, sections, single_literal
from lockstep.config.schema import PATH_KEYS, RunConfig, Section
from lockstep.config.toml_text import KeyPath, dotted, split_dotted


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of the merged tree and its origin. Values are plain: str, int, float, bool, None, list, dict (inside
    lists or empty). ``folder``: what a relative path is seen from, for the keys that name files (``paths.with_paths``
    expands those and makes them absolute)."""

    value: Any
    origin: str
    folder: Path | None = None


Tree = dict[str, "Tree | Leaf"]


@dataclass(frozen=True, slots=True)
class Change:
    """One key (dotted) that a layer sets, and what its origin is shown as."""

    key: str
    value: Any
    origin: str


def change_tree(changes: Iterable[Change]) -> Tree:
    """Changes as a layer; a later one of the same key wins. Relative paths are seen from the working directory."""
    tree: Tree = {}
    for change in changes:
        path = split_dotted(change.key)
        value = change.value if isinstance(change.value, dict) and change.value else None
        node = make_leaf(path, change.value, change.origin, Path())
        put(tree, path, document_tree(value, lambda _, origin=change.origin: origin, Path(), path) if value else node)
    return tree


def document_tree(node: dict[str, Any], origin: Callable[[KeyPath], str], folder: Path, path: KeyPath = ()) -> Tree:
    """Nested dicts as a tree; relative paths (``PATH_KEYS``) are seen from ``folder``."""
    return {
        name: document_tree(value, origin, folder, (*path, name))
        if isinstance(value, dict) and value
        else make_leaf((*path, name), value, origin((*path, name)), folder)
        for name, value in node.items()
    }


def make_leaf(path: KeyPath, value: Any, origin: str, folder: Path) -> Leaf:
    """A leaf at ``path``; that of a key that names a file knows the folder it is seen from."""
    return Leaf(value, origin, folder if dotted(path) in PATH_KEYS else None)


def section_tree(section: Section, origin: str) -> Tree:
    """A section built in Python as a tree. Unset fields are ``default``; so is all of a default section."""
    plain = section.model_dump(mode="json")

    def origin_of(path: KeyPath) -> str:
        node: Any = section
        for part in path:
            if isinstance(node, Section):
                if part not in node.model_fields_set and single_literal(type(node), part) is None:
                    return "default"
                node = getattr(node, part)
        return origin

    return document_tree(plain, origin_of, Path())


def put(tree: Tree, path: KeyPath, node: Tree | Leaf) -> None:
    """Set what is at ``path`` of a tree; what stands in the way is replaced."""
    for part in path[:-1]:
        below = tree.get(part)
        if not isinstance(below, dict):
            below = tree[part] = {}
        tree = below
    tree[path[-1]] = node


def merge(base: Tree, over: Tree, annotation: Any = RunConfig) -> Tree:
    """``over`` laid on ``base``. A section whose discriminator changes is replaced by what ``over`` says of it."""
    members = sections(annotation)
    name = discriminator(members)
    if name in over and name in base and value_of(over[name]) != value_of(base[name]):
        return over
    merged = dict(base)
    for key, value in over.items():
        below = base.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            fields = [m.model_fields[key].annotation for m in members if key in m.model_fields]
            merged[key] = merge(below, value, fields[0] if fields else None)
        else:
            merged[key] = value
    return merged


def value_of(node: Tree | Leaf | None) -> Any:
    """The value of a leaf; trees and None as they are."""
    return node.value if isinstance(node, Leaf) else node


def plain_values(node: Tree | Leaf) -> Any:
    """The tree as nested dicts of values."""
    return node.value if isinstance(node, Leaf) else {key: plain_values(value) for key, value in node.items()}


def without(tree: Tree, keys: set[str], path: KeyPath = ()) -> Tree:
    """The tree without the given dotted keys."""
    return {
        name: without(value, keys, (*path, name)) if isinstance(value, dict) else value
        for name, value in tree.items()
        if dotted((*path, name)) not in keys
    }


def find(tree: Tree, path: KeyPath) -> Tree | Leaf | None:
    """What is at ``path``, or the leaf that ends on the way there (a list holds its items); None where nothing is."""
    node: Tree | Leaf | None = tree
    for part in path:
        if isinstance(node, Leaf) or node is None:
            return node
        node = node.get(part)
    return node
