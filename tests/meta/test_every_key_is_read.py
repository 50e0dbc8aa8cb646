"""Every accepted key of the configuration has a reader: a key that validates and is never used is a silent fault.

A key counts as read where a module outside config and recipes has an attribute access of its name, and that module
also takes the key's section from something (``….trainer``) or names its class. That is a necessary condition, found
from the source text; that the effect is right is for the tests of each part. A key with one possible value has no
other effect that could be missed. ``[trainer.megatron]`` is also read by name, through the catalogue of arguments.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from lockstep.config.cluster_schema import MegatronConfig
from lockstep.config.keys import single_literal, walk
from lockstep.config.schema import RunConfig, Section, TrainerConfig
from lockstep.config.toml_text import dotted
from lockstep.topology.catalogue import read_catalogue

PACKAGE = Path(__file__).parents[2] / "lockstep"


@cache
def names_by_module() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """For each module that may read the configuration: attributes that it loads, and all names that occur."""
    found: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        if relative.parts[0] in ("config", "recipes"):
            continue
        attributes: set[str] = set()
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                attributes.add(node.attr)
            elif isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.alias):
                names.add(node.name)
        found[str(relative)] = (frozenset(attributes), frozenset(names | attributes))
    return found


LEAVES = sorted(
    {(dotted(k.path), k.section) for k in walk() if k.is_leaf and single_literal(k.section, k.path[-1]) is None},
    key=lambda leaf: leaf[0],
)


@pytest.mark.parametrize(("key", "section"), LEAVES)
def test_the_key_is_read_somewhere(key: str, section: type[Section]) -> None:
    if section is MegatronConfig and any(key in table for table in read_catalogue("engine_args").values()):
        return
    *above, name = key.split(".")
    owners = {section.__name__, "find_recipe"} if section is RunConfig else {section.__name__}
    taken_from = above[-1] if above else "config"
    readers = [
        module
        for module, (attributes, names) in names_by_module().items()
        if name in attributes and (owners & names or taken_from in attributes)
    ]
    assert readers, (
        f"{key} ({section.__name__}) is accepted and never read: give it an effect or take it out of the schema"
    )


def test_the_search_would_find_an_unread_key() -> None:
    assert all("no_such_setting" not in attributes for attributes, _ in names_by_module().values())
    assert ("trainer.learning_rate", TrainerConfig) in LEAVES
    assert "model.source" not in {key for key, _ in LEAVES}
