"""A manifest judged against the engine: which layers each tensor fills, and every reason to refuse.

Built once per shape of manifest from a dry load (``vllm_coverage``); a refit of the same names, shapes and types reuses
it.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lockstep.records import Manifest, TensorSpec
from lockstep.rollout.receiver import RefitRefused, dtype_name
from lockstep.rollout.vllm_coverage import DryLoad, Geometry, Write, dry_load, num_covered, numel
from lockstep.rollout.vllm_reload import LayerwiseReload, checkpoint_layout

_EXACT = {("bfloat16", "float32"), ("float16", "float32"), ("float8_e8m0fnu", "float32")}
"""Conversions that keep every value."""
_ROUNDED = {("float32", "bfloat16")}
"""The policy is then the rounded weights, as in the embedded engine."""

_ENGINE_OWNED = re.compile(r"(^|\.)_?(q|k|v|prob)_scale$|(^|\.)(_expert_map|expert_mask|expert_\w+_to_\w+)$")
"""Scales of the cache and layout maps: derived state of the registry, no checkpoint has to bring them."""

_LAYER_INDEX = re.compile(r"\blayers\.(\d+)\.")
_EXPERT_INDEX = re.compile(r"\bexperts\.(\d+)\.")


def is_engine_owned(target: str) -> bool:
    """Whether a live tensor is the engine's own business: a scale of its cache, or a map of its layout."""
    return _ENGINE_OWNED.search(target) is not None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a manifest that the engine can take goes in.

    ``layers``: paths of the modules that a tensor fills. ``unit``: tensors that share a layer have one number and are
    loaded together, whatever the border of a bucket. ``bypassed``: layers that their loader writes without the
    parameters' weight loaders. ``padded``: layers with values that no tensor fills. ``elsewhere``:
    tensors that belong to other ranks.
    """

    writes: Mapping[str, tuple[Write, ...]]
    targets: Mapping[str, torch.Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    layers: Mapping[str, frozenset[str]]
    unit: Mapping[str, int]
    unit_size: Mapping[int, int]
    bypassed: frozenset[str]
    padded: frozenset[str]
    elsewhere: frozenset[str]


def plan_load(model: torch.nn.Module, manifest: Manifest, reload: LayerwiseReload) -> LoadPlan:
    """Ask the model's own loader where each tensor would go. Nothing is written. Raises RefitRefused with every
    problem by name: missing, extra, doubled, ill-shaped, ill-typed."""
    specs, problems = _specs(manifest)
    with checkpoint_layout(model, reload) as twins:
        targets = dict(twins)
        dry = dry_load(
            model.load_weights,  # pyright: ignore[reportArgumentType]
            targets,
            reload.loader_of,
            {name: (spec.shape, getattr(torch, spec.dtype)) for name, spec in specs.items()},
        )
    problems += [
        f"refused: {name} {specs[name].shape if name in specs else ''}: the engine's loader says {text}"
        for name, text in dry.refused.items()
    ]
    if dry.complete:
        problems += dry.problems
        problems += _extra(specs, dry)
        problems += _misfits(specs, targets, dry)
        problems += _uncovered(model, specs, targets, dry)
    if problems:
        raise RefitRefused(
            f"manifest of version {manifest.version} refused, {len(problems)} problem(s): " + "; ".join(problems[:20])
        )
    return _plan(specs, targets, dry)


def _specs(manifest: Manifest) -> tuple[dict[str, TensorSpec], list[str]]:
    specs: dict[str, TensorSpec] = {}
    problems = []
    if manifest.naming != "checkpoint":
        problems.append(
            f"naming: the manifest is in {manifest.naming} names, this engine's loader reads checkpoint names"
        )
    for spec in manifest.tensors:
        if spec.name in specs:
            problems.append(f"doubled: {spec.name} is twice in the manifest")
        if not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
            problems.append(f"dtype: {spec.name} is {spec.dtype}, which is no type")
        else:
            specs[spec.name] = spec
    problems.extend(
        f"tied: {name} → {first}, which does not travel" for name, first in manifest.tied.items() if first not in specs
    )
    return specs, problems


def _extra(specs: Mapping[str, TensorSpec], dry: DryLoad) -> list[str]:
    return [
        f"extra: {name} {spec.shape} would be ignored by the engine's loader, which reports success all the same"
        for name, spec in specs.items()
        if name not in dry.writes and name not in dry.offered and name not in dry.refused
    ]


def _misfits(specs: Mapping[str, TensorSpec], targets: Mapping[str, torch.Tensor], dry: DryLoad) -> list[str]:
    problems = []
    for name, writes in dry.writes.items():
        for target in sorted({write.target for write in writes}):
            pair = (specs[name].dtype, dtype_name(targets[target]))
            if pair[0] != pair[1] and pair not in _EXACT | _ROUNDED:
                problems.append(f"dtype: {name} is {pair[0]}, the engine's {target} is {pair[1]}")
        read = [write.source for write in writes]
        if all(source is not None for source in read):
            taken = sum(numel(source) for source in set(read) if source is not None)
            if taken < math.prod(specs[name].shape):
                problems.append(f"shape: {name} {specs[name].shape}: the loader takes only {taken} of its values")
    return problems


def _uncovered(
    model: torch.nn.Module, specs: Mapping[str, TensorSpec], targets: Mapping[str, torch.Tensor], dry: DryLoad
) -> list[str]:
    regions: dict[str, dict[Geometry, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, writes in dry.writes.items():
        for write in writes:
            regions[write.target][write.region].append(name)
    problems = []
    done: set[int] = set()
    for target, tensor in targets.items():
        if id(tensor) in done or is_engine_owned(target) or tensor.numel() == 0:
            continue
        done.add(id(tensor))
        aliases = [name for name, other in targets.items() if other is tensor]
        filled = {region: names for alias in aliases for region, names in regions[alias].items()}
        problems.extend(
            f"doubled: {' and '.join(sorted(set(names)))} go to the same place of {target}"
            for names in filled.values()
            if len(set(names)) > 1
        )
        written = sum(numel(region) for region in filled)
        wanted = getattr(tensor, "weight_loader_numel", tensor.numel())
        constants = {region for alias in aliases for region in dry.padding[alias]}
        if constants and 0 < written <= tensor.numel():  # a constant may lie under what is written later
            written = num_covered(tensor, constants | filled.keys())
        if written < wanted:
            names = _would_fill(model, target, targets, dry, specs)
            likely = f" ({', '.join(names)} not in the manifest)" if names else ""
            problems.append(f"missing: {written} of {wanted} values of the live {target} would be written{likely}")
        elif written > tensor.numel():
            problems.append(f"doubled: {written} values for the {tensor.numel()} of {target}")
    return problems


def _would_fill(
    model: torch.nn.Module,
    target: str,
    targets: Mapping[str, torch.Tensor],
    dry: DryLoad,
    specs: Mapping[str, TensorSpec],
) -> list[str]:
    """Names that probably belong to ``target``, by analogy with other layers, other experts and packed modules."""
    here = _LAYER_INDEX.search(target)
    like = _LAYER_INDEX.sub("layers.*.", target)
    guesses: set[str] = set()
    for name, writes in dry.writes.items():
        if not any(_LAYER_INDEX.sub("layers.*.", write.target) == like for write in writes):
            continue
        moved = _LAYER_INDEX.sub(f"layers.{here.group(1)}.", name) if here else name
        num_experts = targets[target].shape[0]
        if _EXPERT_INDEX.search(moved):
            guesses.update(_EXPERT_INDEX.sub(f"experts.{expert}.", moved) for expert in range(num_experts))
        guesses.add(moved)
    owner, _, leaf = target.rpartition(".")
    parent, _, packed = owner.rpartition(".")
    packing: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    guesses.update(f"{parent}.{part}.{leaf}" for part in packing.get(packed, ()))
    if not guesses:
        guesses.add(target)
    return sorted(guesses - specs.keys())[:4]


def _plan(specs: Mapping[str, TensorSpec], targets: Mapping[str, torch.Tensor], dry: DryLoad) -> LoadPlan:
    layers = {name: frozenset(write.target.rpartition(".")[0] for write in dry.writes.get(name, ())) for name in specs}
    root: dict[str, str] = {}

    def find(path: str) -> str:
        while (above := root.setdefault(path, path)) != path:
            path = above
        return path

    for paths in layers.values():
        first, *others = sorted(paths) or [""]
        for other in others:
            root[find(other)] = find(first)
    numbers: dict[str, int] = {}
    unit = {
        name: numbers.setdefault(find(min(paths)) if paths else f"elsewhere {name}", len(numbers))
        for name, paths in layers.items()
    }
    filled: Counter[str] = Counter()
    for writes in dry.writes.values():
        for write in writes:
            filled[write.target] += numel(write.region)
    return LoadPlan(
        writes={name: tuple(dry.writes.get(name, ())) for name in specs},
        targets=dict(targets),
        shapes={name: spec.shape for name, spec in specs.items()},
        layers=layers,
        unit=unit,
        unit_size=Counter(unit.values()),
        bypassed=frozenset(
            write.target.rpartition(".")[0]
            for writes in dry.writes.values()
            for write in writes
            if not write.through_loader
        ),
        padded=frozenset(
            target.rpartition(".")[0] for target, tensor in targets.items() if filled[target] < tensor.numel()
        ),
        elsewhere=frozenset(name for name in specs if name not in dry.writes),
    )
