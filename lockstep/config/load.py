"""Reading a run configuration: recipe → TOML files (``extends``) → ``--set``, with the origin of every value.

Layers are merged key by key; later ones win. Where a layer changes the kind of a section (``model.source``,
``task.kind``) the section is replaced, not merged. All ``--set`` together are one layer.

Rules that are not visible in the schema:

- ``extends = "name"`` builds on a recipe, ``extends = "other.toml"`` on a file (relative to the file that says it).
- ``unset = ["trainer.clip_grad_norm"]`` in a file, or ``--set trainer.clip_grad_norm=none``, sets a key that may be
  none to none (TOML has no null); of a variable under ``environment`` it takes out what a layer below has set.
- A relative path (keys ``model.path``, ``task.path``, …) is relative to the TOML file that sets it; in ``--set`` and
  in recipes, to the working directory. ``~`` and variables are expanded in these keys alone (``paths.py``). The
  resolved configuration holds absolute paths.
- Overlays and variants of a recipe lie between it and the files that extend it.
"""

from __future__ import annotations

import datetime
import difflib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from lockstep.config.checks import check
from lockstep.config.errors import ConfigError, Violation
from lockstep.config.keys import describe, discriminator, nearest_keys, sections, strip_tags
from lockstep.config.overrides import override_value, without_unset_variables
from lockstep.config.paths import escape, with_paths
from lockstep.config.schema import PATH_KEYS, RunConfig, Section
from lockstep.config.secrets import shown, shown_config
from lockstep.config.toml_text import KeyPath, dotted, format_value, leaves, split_dotted, value_lines
from lockstep.config.tree import (
    Change,
    Leaf,
    Tree,
    change_tree,
    document_tree,
    find,
    make_leaf,
    merge,
    plain_values,
    put,
    section_tree,
    value_of,
    without,
)

FindRecipe = Callable[[str], RunConfig]
"""Looks a recipe up by name; raises ``ConfigError`` for an unknown one."""

ChangesOf = Callable[[str, Any], Sequence[Change]]
"""The overlay and variants of a recipe, by its name ("" for a file that extends none) and by what is laid on it: files
and ``--set`` as nested dicts."""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A checked configuration and, for every leaf key (dotted), where its value came from: ``default``,
    ``recipe quickstart``, ``file my.toml:12`` or ``--set``. ``recipe``: what it builds on, empty for none."""

    config: RunConfig
    origins: dict[str, str] = field(default_factory=dict)
    recipe: str = ""


def load_run_config(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    find_recipe: FindRecipe,
    changes_of: ChangesOf | None = None,
    options: Sequence[Change] = (),
) -> ResolvedConfig:
    """The configuration of ``recipe`` (a recipe's name or a TOML file) with ``overrides`` ("a.b=c"); ``options`` are
    those of the command line that stand for a key, and win.

    Raises ``ConfigError`` with every problem at once: keys, values, types, ranges, settings that disagree.
    """
    name, layers = _base_layers(recipe, find_recipe, ())
    overlay, violations = _overrides_tree(overrides)
    above = reduce(merge, [*layers[1:], overlay, change_tree(options)], {})
    changes = change_tree(changes_of(name, plain_values(above))) if changes_of else {}
    tree, unknown = without_unset_variables(reduce(merge, [layers[0], changes, above]), [changes, *layers])
    resolved = _resolve(tree, f"configuration of {recipe}", violations + unknown, layers[0])
    return replace(resolved, recipe=name)


def resolve_config(config: RunConfig, origin: str) -> ResolvedConfig:
    """Check a configuration built in Python; keys it leaves at their default say so. Raises ``ConfigError``."""
    return _resolve(section_tree(config, origin), origin, [])


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every leaf of a configuration under its dotted key, as plain values; secrets are masked."""
    plain = shown_config(config.model_dump(mode="json"))
    flat: dict[str, Any] = {}
    for path in leaves(plain):
        value: Any = plain
        for part in path:
            value = value[part]
        flat[dotted(path)] = value
    return flat


def dump_resolved(resolved: ResolvedConfig) -> str:
    """The whole configuration as TOML, the origin behind each value. Loads again to an equal ``RunConfig``; secrets are
    masked. A key that is none is a comment; where none is not its default, it is listed under ``unset``. Raises
    ``ValueError`` for a none inside a list, which TOML can't say.
    """
    config, origins = resolved.config, resolved.origins
    unset: list[str] = []
    body = _dump_section(config, (), origins, unset)
    head = ["# Resolved configuration. Behind each value: where it came from."]
    if unset:
        head += ["unset = [", *(f"    {format_value(key)},{_comment(origins.get(key))}" for key in unset), "]"]
    return "\n".join([*head, *body, ""])


def _dump_section(section: Any, path: KeyPath, origins: dict[str, str], unset: list[str]) -> list[str]:
    """Lines of a section or free table: its values first, then its tables."""
    is_section = isinstance(section, Section)
    items = {name: getattr(section, name) for name in type(section).model_fields} if is_section else section
    values: list[str] = []
    tables: list[str] = []
    for name, value in items.items():
        key = dotted((*path, name))
        if isinstance(value, Section) or (isinstance(value, dict) and value):
            tables += ["", f"[{key}]", *_dump_section(value, (*path, name), origins, unset)]
        elif value is None:
            if not is_section or type(section).model_fields[name].default is not None:
                unset.append(key)
            values.append(f"# {dotted((name,))}: none{_comment(origins.get(key))}")
        else:
            plain = section.model_dump(mode="json", include={name})[name] if is_section else value
            plain = escape(plain) if key in PATH_KEYS and isinstance(plain, str) else plain
            plain = shown((*path, name), plain)
            values.append(f"{dotted((name,))} = {format_value(plain)}{_comment(origins.get(key))}")
    return values + tables


def _comment(origin: str | None) -> str:
    return "  # " + "".join(c if c.isprintable() else "?" for c in origin or "default")


# --- layers -----------------------------------------------------------------------------------------------------------


def _base_layers(recipe: str, find_recipe: FindRecipe, seen: tuple[Path, ...]) -> tuple[str, list[Tree]]:
    """The recipe at the bottom ("": none) and the layers, the one that all others change first."""
    if not recipe.endswith(".toml") and os.sep not in recipe:
        return recipe, [section_tree(find_recipe(recipe), f"recipe {recipe}")]
    path = Path(recipe)
    if path.resolve() in seen:
        chain = " → ".join(str(p) for p in (*seen, path.resolve()))
        raise _fatal(recipe, f"files extend each other in a circle: {chain}", "let one of them extend a recipe")
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise _fatal(recipe, f"can't be read: {error}", "give a recipe's name or an existing TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise _fatal(recipe, f"is not valid TOML: {error}", "correct the file at that line") from error
    lines = value_lines(text)

    def origin(key: KeyPath) -> str:
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
        return f"file {recipe}:{line}" if line else f"file {recipe}"

    extends = document.pop("extends", None)
    unset = document.pop("unset", [])
    overlay = document_tree(document, origin, path.parent)
    for key in _unset_paths(recipe, unset):
        put(overlay, key, Leaf(None, origin(("unset",))))
    if extends is None:
        return "", [overlay]
    if not isinstance(extends, str):
        raise _fatal(recipe, f"extends = {extends!r} is not text", 'write extends = "a recipe\'s name or a TOML file"')
    if extends.endswith(".toml") or os.sep in extends:
        extends = str(path.parent / extends)
    name, layers = _base_layers(extends, find_recipe, (*seen, path.resolve()))
    return name, [*layers, overlay]


def _unset_paths(subject: str, unset: Any) -> list[KeyPath]:
    if not isinstance(unset, list) or not all(isinstance(key, str) for key in unset):
        raise _fatal(subject, f"unset = {unset!r} is not a list of keys", 'write unset = ["trainer.clip_grad_norm"]')
    try:
        return [split_dotted(key) for key in unset]
    except ValueError as error:
        raise _fatal(subject, f"unset: {error}", 'write dotted keys, as in "trainer.clip_grad_norm"') from error


def _overrides_tree(overrides: Sequence[str]) -> tuple[Tree, list[Violation]]:
    """The layer of ``--set``, values as ``override_value`` reads them."""
    tree: Tree = {}
    violations: list[Violation] = []
    for text in overrides:
        name, equals, raw = text.partition("=")
        try:
            if not equals:
                raise ValueError("there is no = in it")
            key = split_dotted(name.strip())
            raw.encode()
        except ValueError as error:
            message = f"--set {text!a} can't be read: {error}"
            violations.append(Violation("", message, "write --set section.key=value"))
            continue
        value = override_value(key, raw)
        for path in leaves(value):
            item: Any = value
            for part in path:
                item = item[part]
            put(tree, (*key, *path), make_leaf((*key, *path), item, "--set", Path()))
    return tree, violations


# --- validation -------------------------------------------------------------------------------------------------------


def _resolve(tree: Tree, subject: str, violations: list[Violation], base: Tree | None = None) -> ResolvedConfig:
    tree, unknown_paths = with_paths(tree, os.environ)
    config, problems = _validate(tree)
    violations = violations + unknown_paths + problems
    if config is None:
        # The rest may still be checked with the wrong keys left out (or as in ``base``): all problems show at once.
        wrong = {v.key.split("[")[0].removesuffix(".source").removesuffix(".kind") for v in problems}
        config, _ = _validate(_mended(tree, wrong, base or {}))
        broken = check(config) if config else []
        violations += [v for v in broken if not any(_overlap(k, w) for k in (v.key, *v.also) for w in wrong)]
    else:
        violations += check(config)
    if violations or config is None:
        raise ConfigError(subject, [_with_settings(v, tree, config) for v in violations])
    origins = {key: _origin(tree, split_dotted(key)) for key in flatten(config)}
    return ResolvedConfig(config, origins)


def _mended(tree: Tree, wrong: set[str], base: Tree) -> Tree:
    mended = without(tree, wrong)
    for path in map(split_dotted, wrong):
        node, above = find(base, path), find(base, path[:-1])
        if node is not None and isinstance(above, dict):
            put(mended, path, node)
    return mended


def _validate(tree: Tree) -> tuple[RunConfig | None, list[Violation]]:
    """The configuration, or None and what is wrong. Validated as JSON, where a list may stand for a tuple."""
    plain = plain_values(tree)
    way_out = 'quote it: key = "2026-01-01"'
    dates = [
        Violation(dotted(path), "dates and times are not a value of any setting", way_out)
        for path in leaves(plain)
        if _holds_time(value_of(find(tree, path)))
    ]
    try:
        config = RunConfig.model_validate_json(json.dumps(plain, default=str))
    except ValidationError as error:
        problems = [_violation(item, tree) for item in error.errors(include_url=False)]
        return None, dates + [p for p in problems if p.key not in {d.key for d in dates}]
    return (None if dates else config), dates


def _holds_time(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(_holds_time(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, datetime.date | datetime.time)


def _violation(error: Any, tree: Tree) -> Violation:
    """A pydantic error in this project's words."""
    path, inside, annotation, info = strip_tags(error["loc"])
    kind, key = error["type"], dotted(path) + inside
    if kind == "extra_forbidden":
        variants = _variants(tree)
        near = nearest_keys(path, variants) if not inside else ""
        return Violation(key, "unknown key", near or "remove it; `lockstep recipes show quickstart` prints all keys")
    allowed = describe(annotation, info)
    if kind.startswith("union_tag"):
        name = str(error["ctx"]["discriminator"]).strip("'")
        choices = str(error["ctx"].get("expected_tags", "")).replace("'", '"')
        allowed = f"one of {choices}" if choices else allowed
        return Violation(
            f"{key}.{name}",
            "is missing" if kind.endswith("not_found") else "is none of the kinds",
            "set it to one of the allowed kinds",
            allowed=allowed,
        )
    if kind == "missing":
        return Violation(key, "is required and missing", "set it, or extend a recipe that does", allowed=allowed)
    if kind == "literal_error":
        near = difflib.get_close_matches(str(error["input"]), [str(c) for c in get_args(annotation)], n=1)
        way_out = f'did you mean "{near[0]}"?' if near else "give one of the allowed values"
    else:
        way_out = _way_out(error["input"], kind)
    return Violation(key, "this value is refused", way_out, allowed=allowed)


def _variants(tree: Tree) -> dict[KeyPath, str]:
    """The kind in use of each section that has kinds: {("model",): "gguf", …}."""
    found: dict[KeyPath, str] = {}
    for name, field_info in RunConfig.model_fields.items():
        kind = discriminator(sections(field_info.annotation))
        below = tree.get(name)
        if kind and isinstance(below, dict) and kind in below:
            found[(name,)] = str(value_of(below[kind]))
    return found


def _way_out(value: Any, kind: str) -> str:
    if kind == "string_type" and value is not None:
        return f'quote it: "{value}" (in a shell --set \'key="{value}"\')'
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        lowered = value.lower()
        if lowered in ("none", "null"):
            return 'to leave it unset, list the key under unset in a TOML file (unset = ["a.key"]), or --set key=none'
        if kind == "bool_type" and lowered in ("true", "false", "yes", "no", "on", "off", "1", "0"):
            return "write true" if lowered in ("true", "yes", "on", "1") else "write false"
        return "write it as a TOML value, without quotes (0.5, not .5)"
    return "give one of the allowed values"


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


# --- origins ----------------------------------------------------------------------------------------------------------


def _origin(tree: Tree, path: KeyPath) -> str:
    node = find(tree, path)
    return node.origin if isinstance(node, Leaf) else "default"


def _with_settings(violation: Violation, tree: Tree, config: RunConfig | None) -> Violation:
    """The violation with a line "key = value  [origin]" for each key that takes part."""
    return replace(violation, settings=tuple(_settings(filter(None, (violation.key, *violation.also)), tree, config)))


def _settings(keys: Iterable[str], tree: Tree, config: RunConfig | None) -> Iterable[str]:
    for key in keys:
        path = split_dotted(key.split("[")[0])
        node = find(tree, path)
        if isinstance(node, Leaf):
            value, origin = shown(path, node.value), node.origin
        elif node is None and config is not None and (default := _attribute(config, path)) is not _MISSING:
            value, origin = default, "default"
        else:
            places = [str(leaf.origin) for leaf in _leaves_below(node)] if isinstance(node, dict) else []
            yield f"{key}  [{places[0]}]" if places else key
            continue
        try:
            text = "none" if value is None else format_value(value)
        except ValueError:
            text = repr(value)
        yield f"{key.split('[')[0]} = {text}  [{origin}]" + (f"  at {key}" if "[" in key else "")


def _leaves_below(tree: Tree) -> Iterator[Leaf]:
    for node in tree.values():
        if isinstance(node, Leaf):
            yield node
        else:
            yield from _leaves_below(node)


_MISSING = object()


def _attribute(config: Any, path: KeyPath) -> Any:
    for part in path:
        config = getattr(config, part, _MISSING) if isinstance(config, Section) else _MISSING
    return _MISSING if isinstance(config, Section) else config


def _fatal(subject: str, message: str, way_out: str) -> ConfigError:
    return ConfigError(subject, [Violation("", message, way_out)])
