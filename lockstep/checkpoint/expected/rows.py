"""What a layout is written in: rows of tensor names with symbolic shapes, and a reader of untrusted configurations.

A family (``llama.py``, ``glm.py``, …) reads its sizes from ``config.json`` and lays blocks of rows over the layers;
this file turns blocks into expected tensors. The lists come from the published files and from nothing in this package
that writes checkpoints: a mistake there must show here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.checkpoint.errors import Problem, shown
from lockstep.checkpoint.headers import MAX_TENSORS

Role = Literal["linear", "expert", "kept", "ids"]
"""``linear`` and ``expert``: may be quantised, else in the model's dtype. ``kept``: never quantised, in the model's
dtype or in float32 (norms, biases, routers, …). ``ids``: integers."""

Part = Literal["model", "mtp", "towers"]
"""``mtp`` (layers for speculation) and ``towers`` (pictures, sound) may be missing as a whole."""

MAX_SIZE = 2**31
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor, or one for each expert where the name has ``{e}``. ``dims`` are products of sizes by name
    ("heads*head_dim", "2*hidden", "3"); None: not checked."""

    name: str
    dims: tuple[str, ...] | None
    role: Role = "kept"


@dataclass(frozen=True, slots=True)
class Block:
    """Rows under a prefix, with the sizes that their dims name."""

    prefix: str
    rows: Sequence[Row]
    sizes: Mapping[str, int]
    part: Part = "model"


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that a checkpoint must have, before quantisation: ``shape`` None where only the name is known."""

    name: str
    shape: tuple[int, ...] | None
    role: Role
    part: Part


@dataclass(frozen=True, slots=True)
class Layout:
    """A family's checkpoint as its configuration describes it. ``facts``: sizes by the names of
    ``lockstep.topology.records.ModelShape``, for comparison with what a recipe expects."""

    blocks: Sequence[Block]
    facts: Mapping[str, Any]


def linear(name: str, rows: str, columns: str) -> Row:
    """A linear layer's weight [rows, columns]."""
    return Row(f"{name}.weight", (rows, columns), "linear")


def norm(name: str, size: str) -> Row:
    """A norm's weight [size]."""
    return Row(f"{name}.weight", (size,))


def expand(layout: Layout, problems: list[Problem]) -> dict[str, Expected]:
    """All expected tensors by name; a configuration that asks for more than ``MAX_TENSORS`` is a problem."""
    total = sum(_count(block, row) for block in layout.blocks for row in block.rows)
    if total > MAX_TENSORS:
        problems.append(Problem("config.json is refused", f"it describes {total} tensors; no model has {MAX_TENSORS}"))
        return {}
    return {tensor.name: tensor for block in layout.blocks for row in block.rows for tensor in _tensors(block, row)}


def _count(block: Block, row: Row) -> int:
    return block.sizes["experts"] if "{e}" in row.name else 1


def _tensors(block: Block, row: Row) -> Iterator[Expected]:
    shape = None if row.dims is None else tuple(_size(dim, block.sizes) for dim in row.dims)
    if "{e}" not in row.name:
        yield Expected(block.prefix + row.name, shape, row.role, block.part)
        return
    for expert in range(block.sizes["experts"]):
        yield Expected(block.prefix + row.name.replace("{e}", str(expert)), shape, row.role, block.part)


def _size(expression: str, sizes: Mapping[str, int]) -> int:
    return math.prod(int(factor) if factor.isdecimal() else sizes[factor] for factor in expression.split("*"))


class Reader:
    """Typed access to an untrusted configuration: what is missing or ill-typed becomes a problem, and 1 or nothing is
    returned in its place, so that all problems are found in one pass."""

    def __init__(self, config: Mapping[str, Any], problems: list[Problem], place: str = "") -> None:
        self.config, self.problems, self.place = config, problems, place

    def section(self, key: str) -> Reader:
        """A nested configuration."""
        value = self.config.get(key)
        if not isinstance(value, dict):
            self.refuse(key, "must be an object")
            value = {}
        return Reader(value, self.problems, f"{self.place}{key}.")

    def refuse(self, key: str, why: str) -> None:
        """Note a problem with a key."""
        self.problems.append(Problem("config.json is refused", f"{self.place}{key}: {why}"))

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self.config.get(key) is not None

    def count(self, *keys: str, default: int | None = None, least: int = 0) -> int:
        """A number of layers, of which no model has thousands."""
        return self.size(*keys, default=default, least=least, most=MAX_LAYERS)

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """A positive integer under the first of ``keys`` that is there."""
        key = next((key for key in keys if self.has(key)), None)
        if key is None:
            if default is None:
                self.refuse(" or ".join(keys), "is missing")
            return 1 if default is None else default
        value = self.config[key]
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, f"{shown(value)} is no integer from {least} to {most}")
            return max(1, least)
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"{shown(value)} is neither true nor false")
            return default
        return value

    def per_layer(self, key: str, num_layers: int, allowed: Sequence[Any]) -> tuple[Any, ...] | None:
        """A list with one entry a layer; None where there is none, and, with a problem, where it is no such list."""
        if not self.has(key):
            return None
        value = self.config[key]
        if not isinstance(value, list) or len(value) != num_layers:
            got = f"{len(value)} entries" if isinstance(value, list) else shown(value)
            self.refuse(key, f"must be a list of {num_layers} entries, one a layer; it is {got}")
            return None
        wrong = [entry for entry in value if isinstance(entry, bool) or entry not in allowed]
        if wrong:
            self.refuse(key, f"{shown(wrong[0])} is none of {', '.join(map(str, allowed))}")
            return None
        return tuple(value)

    def layer_ids(self, key: str, num_layers: int) -> frozenset[int] | None:
        """A list of layer numbers, each once."""
        if not self.has(key):
            return None
        value = self.config[key]
        sound = isinstance(value, list) and all(type(n) is int and 0 <= n < num_layers for n in value)
        if not sound or len(set(value)) != len(value):
            self.refuse(key, f"must be a list of different layer numbers below {num_layers}")
            return None
        return frozenset(value)

    def agreed(self, key: str, stated: tuple[Any, ...] | None, other: str, derived: tuple[Any, ...] | None) -> Any:
        """What two keys say of the layers; a problem if they differ, or if both are missing."""
        if stated is not None and derived is not None and stated != derived:
            first = next(n for n, (one, two) in enumerate(zip(stated, derived, strict=True)) if one != two)
            self.refuse(key, f"disagrees with {other} from layer {first}: {stated[first]} and {derived[first]}")
        if stated is None and derived is None and not (self.has(key) or self.has(other)):
            self.refuse(key, f"is missing, and so is {other}: one of them says what each layer is")
        return stated if stated is not None else derived

    def rope(self) -> dict[str, Any]:
        """``rope_theta`` and ``rope_type``, wherever a release of transformers writes them."""
        parameters = self.config.get("rope_parameters") or {}
        parameters = parameters.get("main", parameters) if isinstance(parameters, dict) else {}
        scaling = self.config.get("rope_scaling") or {}
        scaling = scaling if isinstance(scaling, dict) else {}
        theta = parameters.get("rope_theta", self.config.get("rope_theta"))
        kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
        return {"rope_theta": theta, "rope_type": kind}


@dataclass(slots=True)
class Sizes:
    """Sizes under short names while a family reads them, and the facts that they are."""

    sizes: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: int, fact: str = "") -> int:
        """Note a size; ``fact`` is its name in ``ModelShape``."""
        self.sizes[name] = value
        if fact:
            self.facts[fact] = value
        return value
