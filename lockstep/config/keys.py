"""What the schema knows about its keys: every key, what it allows, and the nearest known key to an unknown one.

Derived from the pydantic models, so that an error text can't drift from the schema.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from lockstep.config.schema import RunConfig, Section
from lockstep.config.toml_text import KeyPath, dotted


@dataclass(frozen=True)
class Key:
    """One key of the schema. ``variant`` is the tag of the union member that has it ("" outside unions)."""

    path: KeyPath
    field: FieldInfo
    section: type[Section]
    variant: str = ""

    @property
    def is_leaf(self) -> bool:
        """True unless the key is a section of its own."""
        return not sections(self.field.annotation)


def sections(annotation: Any) -> tuple[type[Section], ...]:
    """The sections that a value of this annotation may be (several for a discriminated union, none for a leaf)."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    if get_origin(annotation) is Annotated:
        return sections(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(s for member in get_args(annotation) for s in sections(member))
    return ()


def discriminator(members: tuple[type[Section], ...]) -> str | None:
    """The field whose single literal tells the members of a union apart; None where there is one member."""
    if len(members) < 2:
        return None
    for name in members[0].model_fields:
        tags = [single_literal(member, name) for member in members]
        if None not in tags and len(set(tags)) == len(members):
            return name
    raise TypeError(f"union without a discriminator: {[m.__name__ for m in members]}")


def tag(member: type[Section], members: tuple[type[Section], ...]) -> str:
    """The discriminator's value for a member of a union; "" where there is no union."""
    name = discriminator(members)
    return "" if name is None else str(single_literal(member, name))


def single_literal(section: type[Section], name: str) -> str | None:
    """The value of a field that allows only one (a union's tag), else None."""
    field = section.model_fields.get(name)
    if field is None or get_origin(field.annotation) is not Literal:
        return None
    values = get_args(field.annotation)
    return values[0] if len(values) == 1 else None


def walk(section: type[Section] = RunConfig, path: KeyPath = (), variant: str = "") -> Iterator[Key]:
    """Every key of the schema, sections before what they hold; keys of a union come once for each member."""
    for name, field in section.model_fields.items():
        yield Key((*path, name), field, section, variant)
        members = sections(field.annotation)
        for member in members:
            yield from walk(member, (*path, name), tag(member, members) or variant)


@cache
def all_keys() -> tuple[Key, ...]:
    """``walk()`` of the run configuration, as a tuple."""
    return tuple(walk())


def strip_tags(location: tuple[int | str, ...]) -> tuple[KeyPath, str, Any, FieldInfo | None]:
    """A pydantic error location without the union tags that pydantic inserts.

    Returns the path of the key that a file or ``--set`` can name, the rest as text ("[0].weight" inside a list), the
    annotation at the location (None for an unknown key) and the field that it comes from.
    """
    path: list[str] = []
    inside = ""
    annotation: Any = RunConfig
    field: FieldInfo | None = None
    for part in location:
        members = sections(annotation)
        if len(members) > 1:
            chosen = [m for m in members if tag(m, members) == part]
            if chosen:
                annotation = chosen[0]
                continue
        if members and isinstance(part, str) and part in members[0].model_fields:
            field = members[0].model_fields[part]
            annotation = field.annotation
        elif isinstance(part, int):
            annotation = get_args(annotation)[0] if get_origin(annotation) is tuple else None
            inside += f"[{part}]"
            field = None
            continue
        else:
            annotation, field = None, None
        if inside:
            inside += f".{part}"
        else:
            path.append(str(part))
    return tuple(path), inside, annotation, field


def describe(annotation: Any, field: FieldInfo | None = None) -> str:
    """What an annotation allows, in words: "an integer ≥ 1", "one of "a", "b"", "a number > 0, or none"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    members = sections(annotation)
    if members:
        name = discriminator(members)
        choice = f" whose {name} is one of {_choices([tag(m, members) for m in members])}" if name else ""
        text = f"a table{choice}" if choice else f"a table with {', '.join(members[0].model_fields)}"
        return text + (", or none" if type(None) in arguments else "")
    if origin in (Union, types.UnionType):
        return ", or ".join("none" if a is type(None) else describe(a, field) for a in arguments)
    if origin is Annotated:
        return describe(arguments[0], field)
    if origin is Literal:
        return f"one of {_choices(arguments)}" if len(arguments) > 1 else _choices(arguments)
    if origin is tuple:
        return f"a list, each item {describe(arguments[0])}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    return words.get(annotation, "a table" if origin is dict else "a value") + _bounds(field)


def _choices(values: Any) -> str:
    return ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in values)


def _bounds(field: FieldInfo | None) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    parts: list[str] = []
    for item in field.metadata if field else ():
        parts += [f"{sign} {getattr(item, name)}" for name, sign in signs.items() if hasattr(item, name)]
        if getattr(item, "pattern", None):
            parts.append(f"matching {item.pattern}")
    return f" {' and '.join(parts)}" if parts else ""


def nearest_keys(path: KeyPath, variants: dict[KeyPath, str]) -> str:
    """Text that points from an unknown key to the known ones meant, or "" when nothing is near.

    ``variants`` maps a union's path to the tag in use: a key of another member is known, but not here.
    """
    elsewhere = sorted({k.variant for k in all_keys() if k.path == path and k.variant})
    if elsewhere:
        section = path[:-1]
        name = discriminator(sections(_field_at(section).annotation))
        now = variants.get(section)
        choices = " or ".join(f'"{v}"' for v in elsewhere)
        return f"exists only where {dotted((*section, name or ''))} is {choices}" + (f', it is "{now}"' if now else "")
    known = {k.path: None for k in all_keys() if not k.variant or variants.get(k.path[:1], k.variant) == k.variant}
    scored = sorted(((_likeness(path, candidate), candidate) for candidate in known), key=lambda pair: -pair[0])
    best = [candidate for score, candidate in scored if score >= max(0.66, scored[0][0] - 0.02)][:3]
    return "did you mean " + " or ".join(dotted(b) for b in best) + "?" if best else ""


def _field_at(path: KeyPath) -> FieldInfo:
    return next(k.field for k in all_keys() if k.path == path)


def _likeness(path: KeyPath, candidate: KeyPath) -> float:
    """0 to 1: how likely ``candidate`` was meant by ``path``. Same section counts, and so do initials (lr)."""
    wanted, name = path[-1].lower().replace("-", "_"), candidate[-1]
    initials = "".join(word[0] for word in name.split("_"))
    if wanted == name or (len(initials) > 1 and wanted == initials):
        likeness = 0.95
    else:
        likeness = 0.9 * difflib.SequenceMatcher(None, wanted, name).ratio()
        if len(wanted) > 3 and wanted in name.split("_"):
            likeness = max(likeness, 0.7)
    return likeness + (0.05 if path[:-1] == candidate[:-1] else 0.0)
