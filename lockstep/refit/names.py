"""Whose names: transformers' modules (fused expert stacks) or published checkpoints, mapped by a table per family.

An engine's own loader reads checkpoint names and ignores, with success, what it does not know: transformers' fused
``mlp.experts.gate_up_proj`` pushed as it is loads no expert. So names are translated here, each by a row of its
family's table (``name_tables.py``), and a name without a row is refused. ``as_checkpoint`` cuts views and copies
nothing, but for rows that interleave. Members of an atomic group follow each other whatever order the source has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from lockstep.interfaces import WeightSource
from lockstep.records import Manifest, Naming, Original, TensorSpec
from lockstep.refit.name_tables import TABLES, NameMapError, Row, filled, matched

Shard = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]


def families() -> tuple[str, ...]:
    """transformers' ``model_type`` of every family that has a table."""
    return tuple(sorted(TABLES))


def named_for(source: WeightSource, naming: Naming) -> WeightSource:
    """The source under the names that a receiver takes. Raises NameMapError for a name that can't be translated."""
    return as_checkpoint(source) if naming == "checkpoint" else as_module(source)


def as_checkpoint(source: WeightSource) -> WeightSource:
    """The same weights under the names of published checkpoints; the source itself if it has them already.

    Raises NameMapError for a family without a table, and, listing them, for names without a row.
    """
    return _translated(source, "checkpoint")


def as_module(source: WeightSource) -> WeightSource:
    """The same weights under transformers' module names (expert stacks are put together, which copies them)."""
    return _translated(source, "module")


def _translated(source: WeightSource, naming: Naming) -> WeightSource:
    manifest = source.manifest()
    if manifest.naming == naming:
        return source
    if manifest.quantisation != "none":
        raise NameMapError(
            f"the source is quantised ({manifest.quantisation}): codes are not re-laid; translate its names first, "
            "quantised(as_checkpoint(source), scheme)"
        )
    return _Translated(source, naming)


@dataclass(frozen=True, slots=True)
class _Unit:
    """One row applied to one set of placeholders: which tensors become which."""

    row: Row
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    groups: frozenset[str]  # of the outputs


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a manifest's tensors become: ``specs`` in the order in which they travel, and where each belongs."""

    specs: tuple[TensorSpec, ...]
    unit_of: dict[str, _Unit]  # by the source's name
    group_of: dict[str, str]  # by the translated name, as is ``order``
    inputs_of_group: dict[str, set[str]]
    order: dict[str, int]
    renamed: dict[str, TensorSpec]  # by the source's name: tensors that only change their name, in a group of their own
    originals: dict[str, Original] | None  # None if a tensor is computed


class _Translated:
    """A ``WeightSource`` whose names are translated. Expects that the source's shards are in any order, each once."""

    def __init__(self, source: WeightSource, naming: Naming) -> None:
        self._source = source
        self._naming: Naming = naming
        manifest = source.manifest()
        self._plan = _plan(manifest.model_type, manifest.tensors, naming)

    def manifest(self) -> Manifest:
        """The source's, with the translated tensors, groups kept together."""
        manifest = self._source.manifest()
        return replace(manifest, tensors=self._plan.specs, tied=self._tied(manifest), naming=self._naming)

    def originals(self) -> tuple[WeightSource, Mapping[str, Original]] | None:
        """The source as it was, and what each of its tensors holds; None where a tensor is computed. For whoever knows
        where the parts belong, and would rather copy a stack than its experts."""
        return None if self._plan.originals is None else (self._source, self._plan.originals)

    def shards(self) -> Iterator[Shard]:
        """The translated shards, group by group. A tensor that the source never brings is left out: the receiver counts
        what arrived. Raises NameMapError for one that is not in the manifest or comes twice."""
        plan = self._plan
        arrived: set[str] = set()
        pieces: dict[int, list[Shard]] = {}  # of units that wait for more
        ready: dict[str, list[Shard]] = {}  # of groups that wait for more
        waiting = {group: set(names) for group, names in plan.inputs_of_group.items()}
        for shard in self._source.shards():
            name = shard[0]
            unit = plan.unit_of.get(name)
            if unit is None or name in arrived:
                raise NameMapError(f"{name} comes from the source {'twice' if unit else 'but is not in its manifest'}")
            arrived.add(name)
            if (alone := plan.renamed.get(name)) is not None:
                yield alone.name, alone.shape, shard[2], shard[3]
                continue
            gathered = pieces.setdefault(id(unit), [])
            gathered.append(shard)
            if len(gathered) == len(unit.inputs):
                for output in self._converted(unit, pieces.pop(id(unit))):
                    ready.setdefault(plan.group_of[output[0]], []).append(output)
            for group in unit.groups:
                waiting[group].discard(name)
                if not waiting[group]:
                    yield from sorted(ready.pop(group, ()), key=lambda one: plan.order[one[0]])
        for left in ready.values():  # of groups that stay incomplete: what is there still travels
            yield from left

    def _converted(self, unit: _Unit, pieces: list[Shard]) -> Iterable[Shard]:
        by_name = {piece[0]: piece for piece in pieces}
        ordered = [by_name[spec.name] for spec in unit.inputs]
        if self._naming == "checkpoint":
            return _to_checkpoint(unit, ordered)
        return _to_module(unit, ordered)

    def _tied(self, manifest: Manifest) -> dict[str, str]:
        """Tied names are whole tensors with a plain row on both sides."""
        return {
            _plain(manifest.model_type, name, self._naming): _plain(manifest.model_type, first, self._naming)
            for name, first in manifest.tied.items()
        }


@lru_cache(maxsize=4)
def _plan(model_type: str, tensors: tuple[TensorSpec, ...], naming: Naming) -> _Plan:
    """Kept for the next refit, whose manifest has the same tensors: it takes longer than the transfer on a GPU."""
    units = _units(model_type, tensors, naming)
    specs = [spec for unit in units for spec in unit.outputs]
    inputs_of_group: dict[str, set[str]] = {}
    for unit in units:
        for group in unit.groups:
            inputs_of_group.setdefault(group, set()).update(one.name for one in unit.inputs)
    # Groups in the order in which the source completes them, so that a transfer can follow the manifest.
    position = {spec.name: index for index, spec in enumerate(tensors)}
    complete = {group: max(position[name] for name in names) for group, names in inputs_of_group.items()}
    first = {group: index for index, group in reversed(list(enumerate(spec.group for spec in specs)))}
    specs.sort(key=lambda spec: (complete[spec.group], first[spec.group]))
    return _Plan(
        specs=tuple(specs),
        unit_of={spec.name: unit for unit in units for spec in unit.inputs},
        group_of={spec.name: spec.group for spec in specs},
        inputs_of_group=inputs_of_group,
        order={spec.name: index for index, spec in enumerate(specs)},
        renamed={
            unit.inputs[0].name: unit.outputs[0]
            for unit in units
            if unit.row.layout == "same" and len(inputs_of_group[unit.outputs[0].group]) == 1
        },
        originals=_originals(units) if naming == "checkpoint" else None,
    )


def _originals(units: list[_Unit]) -> dict[str, Original] | None:
    """By the source's name; None if a row does more than cut a contiguous tensor along its first dimensions."""
    originals: dict[str, Original] = {}
    for unit in units:
        if unit.row.layout not in ("same", "experts"):
            return None
        size = unit.outputs[0].shape
        strides = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
        parts = [(spec.name, (size, strides, index * math.prod(size))) for index, spec in enumerate(unit.outputs)]
        originals[unit.inputs[0].name] = Original(unit.inputs[0], tuple(parts), frozenset(name for name, _ in parts))
    return originals


Unit = _Unit


def units_of(model_type: str, tensors: tuple[TensorSpec, ...], naming: Naming) -> list[Unit]:
    """What becomes what on the way to ``naming``, row by row of the table: for who re-lays tensors a part at a time.
    Raises NameMapError listing every name that has no place."""
    return _units(model_type, tensors, naming)


def _units(model_type: str, tensors: tuple[TensorSpec, ...], naming: Naming) -> list[_Unit]:
    """A manifest's tensors by row and placeholders. Raises NameMapError listing every name that has no place."""
    rows = table_of(model_type)
    gathered: dict[tuple[object, ...], dict[tuple[int, int], TensorSpec]] = {}
    found: dict[tuple[object, ...], tuple[Row, dict[str, str]]] = {}
    unknown: list[str] = []
    for spec in tensors:
        hit = _row_of(rows, spec.name, "module" if naming == "checkpoint" else "checkpoint")
        if hit is None:
            unknown.append(spec.name)
            continue
        index, row, member, values = hit
        expert = int(values.pop("e", 0))
        key = (index, *sorted(values.items()))
        found[key] = (row, values)
        gathered.setdefault(key, {})[expert, member] = spec
    if unknown:
        raise NameMapError(
            f"{model_type}: {len(unknown)} name(s) without a row in its name table: {', '.join(unknown[:8])}"
            f"{' …' if len(unknown) > 8 else ''}; nothing is passed through unread, add rows to refit/name_tables.py"
        )
    make = _unit_to_checkpoint if naming == "checkpoint" else _unit_to_module
    return [make(*found[key], members) for key, members in gathered.items()]


def table_of(model_type: str) -> tuple[Row, ...]:
    """The rows of a family. Raises NameMapError for one that has no table."""
    if model_type not in TABLES:
        raise NameMapError(f"no name table for {model_type!r}; there are tables for {', '.join(families())}")
    return TABLES[model_type]


def _row_of(rows: tuple[Row, ...], name: str, side: Naming) -> tuple[int, Row, int, dict[str, str]] | None:
    """(index of the row, row, which of its templates, placeholders) of the row that has this name."""
    for index, row in enumerate(rows):
        for member, template in enumerate(row.module if side == "module" else row.checkpoint):
            values = matched(template, name)
            if values is not None:
                return index, row, member, values
    return None


def _plain(model_type: str, name: str, naming: Naming) -> str:
    hit = _row_of(table_of(model_type), name, "module" if naming == "checkpoint" else "checkpoint")
    if hit is None or hit[1].layout != "same":
        raise NameMapError(f"{model_type}: tied name {name} has no plain row in its name table")
    _, row, _, values = hit
    return filled(row.checkpoint[0] if naming == "checkpoint" else row.module[0], values)


def _complete(row: Row, values: dict[str, str], members: dict[tuple[int, int], TensorSpec], wanted: int) -> None:
    if len(members) != wanted:
        names = ", ".join(spec.name for spec in members.values())
        whole = filled(row.module[0], values)
        raise NameMapError(f"{whole} needs {wanted} tensors of the other naming, {len(members)} are here: {names}")


def _unit_to_checkpoint(row: Row, values: dict[str, str], members: dict[tuple[int, int], TensorSpec]) -> _Unit:
    _complete(row, values, members, len(row.module))
    inputs = tuple(members[0, member] for member in range(len(row.module)))
    first = inputs[0]
    if row.layout == "experts":
        num_experts, rows = first.shape[0], first.shape[1]
        if rows % len(row.checkpoint):
            raise NameMapError(f"{first.name}: {rows} rows are not {len(row.checkpoint)} equal parts")
        shape = (rows // len(row.checkpoint), *first.shape[2:])
        names = [filled(part, {**values, "e": str(e)}) for e in range(num_experts) for part in row.checkpoint]
    else:
        names = [filled(row.checkpoint[0], values)]
        shape = first.shape
        if len(inputs) > 1:
            shape = tuple(size * (len(inputs) if dim == row.dim else 1) for dim, size in enumerate(shape))
    group = filled(row.group, values) if row.group else names[0]
    outputs = tuple(replace(first, name=name, shape=shape, group=group) for name in names)
    return _Unit(row, inputs, outputs, frozenset({group}))


def _unit_to_module(row: Row, values: dict[str, str], members: dict[tuple[int, int], TensorSpec]) -> _Unit:
    num_experts = 1 + max(expert for expert, _ in members)
    _complete(row, values, members, num_experts * len(row.checkpoint))
    inputs = tuple(members[key] for key in sorted(members))
    first = inputs[0]
    shape = first.shape
    if row.layout == "experts":
        shape = (num_experts, shape[0] * len(row.checkpoint), *shape[1:])
    elif len(row.module) > 1:
        shape = tuple(size // (len(row.module) if dim == row.dim else 1) for dim, size in enumerate(shape))
    names = [filled(template, values) for template in row.module]
    group = filled(row.group, values) if row.group else names[0]
    outputs = tuple(replace(first, name=name, shape=shape, group=group) for name in names)
    return _Unit(row, inputs, outputs, frozenset({group}))


# --- tensors ----------------------------------------------------------------------------------------------------------


def _to_checkpoint(unit: _Unit, pieces: list[Shard]) -> Iterator[Shard]:
    _, _, offset, tensor = pieces[0]
    if unit.row.layout == "same":
        yield unit.outputs[0].name, unit.outputs[0].shape, offset, tensor
    elif unit.row.layout == "experts":
        yield from _expert_views(unit, offset, tensor)
    else:
        halves = [_whole(piece) for piece in pieces]
        if len(halves) == 1:
            halves = list(halves[0].chunk(2, dim=unit.row.dim))
        dim = unit.row.dim
        woven = torch.stack(halves, dim=dim + 1).flatten(dim, dim + 1)
        yield unit.outputs[0].name, unit.outputs[0].shape, (0,) * woven.ndim, woven


def _expert_views(unit: _Unit, offset: tuple[int, ...], tensor: torch.Tensor) -> Iterator[Shard]:
    """Per expert and projection, the part that this shard of a stack [E, parts · rows, …] has of it."""
    num_parts = len(unit.row.checkpoint)
    num_rows = unit.outputs[0].shape[0]
    if not any(offset) and tensor.shape[:2] == (len(unit.outputs) // num_parts, num_parts * num_rows):
        views = tensor.unflatten(1, (num_parts, num_rows)).unbind() if num_parts > 1 else tensor.unbind()
        parts = (part for view in views for part in view.unbind()) if num_parts > 1 else views
        for spec, view in zip(unit.outputs, parts, strict=True):
            yield spec.name, spec.shape, (0,) * view.ndim, view
        return
    for local in range(tensor.shape[0]):
        for part in range(num_parts):
            spec = unit.outputs[(offset[0] + local) * num_parts + part]
            start, end = part * num_rows, (part + 1) * num_rows
            low, high = max(start, offset[1]), min(end, offset[1] + tensor.shape[1])
            if low < high:
                view = tensor[local, low - offset[1] : high - offset[1]]
                yield spec.name, spec.shape, (low - start, *offset[2:]), view


def _to_module(unit: _Unit, pieces: list[Shard]) -> Iterator[Shard]:
    row, outputs = unit.row, unit.outputs
    if row.layout == "same":
        yield outputs[0].name, outputs[0].shape, pieces[0][2], pieces[0][3]
        return
    tensors = [_whole(piece) for piece in pieces]
    if row.layout == "experts":
        parts = len(row.checkpoint)
        experts = [torch.cat(tensors[i : i + parts]) for i in range(0, len(tensors), parts)]
        made = [torch.stack(experts)]
    else:
        halves = tensors[0].unflatten(row.dim, (-1, 2)).unbind(row.dim + 1)
        made = list(halves) if len(outputs) > 1 else [torch.cat(halves, dim=row.dim)]
    for spec, tensor in zip(outputs, made, strict=True):
        yield spec.name, spec.shape, (0,) * tensor.ndim, tensor


def _whole(piece: Shard) -> torch.Tensor:
    name, shape, offset, tensor = piece
    if tuple(tensor.shape) != shape or any(offset):
        raise NameMapError(f"{name}: a shard {tuple(tensor.shape)} at {offset} of {shape} can't be re-laid; gather it")
    return tensor
