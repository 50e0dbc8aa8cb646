"""What a flag of another project means here: the row type of the tables ``flags_*.py``, and which flags exist."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.topology.catalogue import read_catalogue

Convert = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One flag (or hydra key) and the setting of a job that it is.

    ``target`` is dotted ("train.tp", "memory.recompute", "engine.dp", "batch.num_prompts", "job.nodes"; "model.hidden"
    for sizes of the model, "launch.x" for what only the reader itself uses). ``convert`` turns its text into the value
    and raises ValueError; None: a switch, whose presence is ``present``. ``source``: where the flag is defined.
    """

    target: str
    source: str
    convert: Convert | None = None
    present: Any = True
    aliases: tuple[str, ...] = field(default=())


class NotRead(ValueError):
    """A value that may well be right and that nothing here knows of."""


def integer(text: str) -> int:
    """A whole number; underscores and exponents are no part of it."""
    if not re.fullmatch(r"[-+]?[0-9]{1,18}", text.strip()):
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def number(text: str) -> float:
    """A finite number."""
    value = float(text)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"{text!r} is no finite number")
    return value


def text(value: str) -> str:
    """The text itself."""
    return value


def boolean(value: str) -> bool:
    """A hydra or argparse boolean."""
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if value.strip().lower() not in known:
        raise ValueError(f"{value!r} is neither true nor false")
    return known[value.strip().lower()]


def optional(convert: Convert) -> Convert:
    """The conversion, with ``null`` and ``None`` as None."""
    return lambda value: None if value.strip().lower() in ("null", "none", "~", "") else convert(value)


def choice(mapping: Mapping[str, Any], default: Any = None) -> Convert:
    """One of a set of texts; ``default`` for any other. Raises NotRead where that is None."""

    def convert(value: str) -> Any:
        if value not in mapping and default is None:
            raise NotRead(f"{value!r} is not read here, only {', '.join(mapping)}")
        return mapping.get(value, default)

    return convert


def lookup(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Rows by flag, aliases included."""
    return {name: row for flag, row in rows.items() for name in (flag, *row.aliases)}


@functools.cache
def known_flags(project: str) -> frozenset[str]:
    """Every flag that the project's parser defines at the commit that ``catalog/launch_flags.toml`` names.

    "miles" has its own flags, Megatron's and, prefixed, SGLang's; so do slime's scripts.
    """
    table = read_catalogue("launch_flags")
    own = set(str(table[project]["flags"]).split())
    if project == "miles":
        own |= set(str(table["slime"]["flags"]).split()) | known_flags("megatron")
        served = {flag.removeprefix("--") for flag in known_flags("sglang") if flag.startswith("--")}
        own |= {f"--{prefix}-{flag}" for flag in served for prefix in ("sglang", "eval-sglang")}
    return frozenset(own)


def nearest_flag(flag: str, project: str) -> str | None:
    """The known flag that an unknown one most looks like: one that differs in ``_`` for ``-`` first."""
    known = known_flags(project)
    hyphened = flag.replace("_", "-")
    if hyphened in known:
        return hyphened
    near = difflib.get_close_matches(flag, sorted(f for f in known if f[:5] == flag[:5]), n=1, cutoff=0.7)
    near = near or difflib.get_close_matches(flag, sorted(known), n=1, cutoff=0.75)
    return near[0] if near else None


def abbreviated(flag: str, project: str) -> str | None:
    """The one flag that an unambiguous prefix stands for, as argparse allows."""
    if not flag.startswith("--") or len(flag) < 5:
        return None
    whole = [known for known in known_flags(project) if known.startswith(flag)]
    return whole[0] if len(whole) == 1 else None
