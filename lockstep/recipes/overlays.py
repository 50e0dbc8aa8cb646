"""What a recipe is changed by: hardware overlays, variants, and recipes that are another one with a few keys changed.

    @overlay("deepseek-v4-flash", hardware="h200")          only what differs there, and why
    def h200() -> Changes:
        return {"cluster.nodes": (8, "eight nodes of eight hold weights and optimizer states without offload"), …}

A recipe has one function whatever it runs on: a second copy would drift from the first. Each change carries its reason,
which `lockstep recipes diff` prints and the resolved configuration shows as the value's origin.

Order, later over earlier: recipe ← overlay ← variants ← files ← --set.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.load import ResolvedConfig
from lockstep.config.schema import RunConfig, Section
from lockstep.config.tree import Change, change_tree, merge, plain_values, section_tree
from lockstep.topology.catalogue import hardware as describe_hardware
from lockstep.topology.catalogue import hardware_names
from lockstep.topology.records import Finding

Changes = Mapping[str, tuple[Any, str]]
"""Dotted key → (value, why). A value may be a ``Section``."""

ChangesFunction = Callable[[], Changes]


@dataclass(frozen=True, slots=True)
class Overlay:
    """What differs on a kind of hardware. ``nodes``: for a layout beside the hardware's first one, its number of nodes.
    ``evidence``: the entry of ``topology/catalog/layouts.toml`` that it must agree with; None: nobody has shown it."""

    recipe: str
    hardware: str
    nodes: int | None
    evidence: str | None
    changes: ChangesFunction


@dataclass(frozen=True, slots=True)
class Variant:
    """A named choice of a recipe. Those of one ``group`` exclude each other; the first of a group has no changes and is
    the recipe as it stands. ``hardware``: the only kinds that it is for; empty: all."""

    recipe: str
    name: str
    group: str
    hardware: tuple[str, ...]
    why: str
    changes: ChangesFunction


_SOURCE = "lockstep/recipes: one function a model, overlays for hardware"

_overlays: dict[tuple[str, str, int | None], Overlay] = {}
_variants: dict[tuple[str, str], Variant] = {}
_default_hardware: dict[str, str] = {}
_bases: dict[str, str] = {}


def overlay(
    recipe: str, *, hardware: str, nodes: int | None = None, evidence: str | None = None
) -> Callable[[ChangesFunction], ChangesFunction]:
    """Register what the decorated function returns as the recipe's overlay for that hardware."""

    def register(function: ChangesFunction) -> ChangesFunction:
        _overlays[recipe, hardware, nodes] = Overlay(recipe, hardware, nodes, evidence, function)
        return function

    return register


def variant(
    recipe: str, name: str, *, group: str, hardware: tuple[str, ...] = ()
) -> Callable[[ChangesFunction], ChangesFunction]:
    """Register what the decorated function returns as a variant; its docstring says what it is for."""

    def register(function: ChangesFunction) -> ChangesFunction:
        why = " ".join((function.__doc__ or "").split())
        _variants[recipe, name] = Variant(recipe, name, group, hardware, why, function)
        return function

    return register


def set_default_hardware(recipe: str, hardware: str) -> None:
    """The kind of hardware that the recipe is for where none is named."""
    _default_hardware[recipe] = hardware


def set_base(recipe: str, base: str) -> None:
    """``recipe`` is made from ``base``: its variants hold for it too, its overlays do not."""
    _bases[recipe] = base


def default_hardware(recipe: str) -> str | None:
    """See ``set_default_hardware``; None: the machine that the run is on."""
    return _default_hardware.get(recipe)


def overlays_of(recipe: str) -> list[Overlay]:
    """Every overlay of a recipe; of one hardware the one without ``nodes`` first."""
    own = [one for one in _overlays.values() if one.recipe == recipe]
    return sorted(own, key=lambda one: (one.hardware, one.nodes or 0))


def variants_of(recipe: str) -> list[Variant]:
    """Every variant of a recipe, those of its base included."""
    names = (recipe, _bases.get(recipe))
    return [one for one in _variants.values() if one.recipe in names]


def apply(config: RunConfig, changes: Changes) -> RunConfig:
    """``config`` with ``changes``: how a recipe is made from another one. Raises pydantic's ``ValidationError``."""
    tree = merge(section_tree(config, "recipe"), change_tree(as_changes(changes, "recipe")))
    return RunConfig.model_validate_json(json.dumps(plain_values(tree)))


def as_changes(changes: Changes, what: str) -> list[Change]:
    """Changes as a layer: what they come from and why is each value's origin."""
    return [Change(key, plain(value), f"{what}: {why}") for key, (value, why) in changes.items()]


def plain(value: Any) -> Any:
    """A value as TOML would give it: sections as tables, tuples as lists."""
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_unset=True)
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def chosen_overlay(recipe: str, hardware: str | None, nodes: int | None) -> Overlay | None:
    """The overlay for that hardware (None: the recipe's own) and number of nodes, or the hardware's first one."""
    hardware = hardware or default_hardware(recipe)
    if hardware is None:
        return None
    return _overlays.get((recipe, hardware, nodes)) or _overlays.get((recipe, hardware, None))


def overlay_findings(resolved: ResolvedConfig) -> Iterator[Finding]:
    """Says where hardware was named that the recipe has no overlay for, or another number of nodes than its overlay's:
    then sizes stand that nobody chose for these devices. Recipes without overlays are for any device."""
    recipe, cluster = resolved.recipe, resolved.config.cluster
    kinds = list(dict.fromkeys(one.hardware for one in overlays_of(recipe)))
    if cluster.hardware is None or not kinds:
        return
    one = chosen_overlay(recipe, cluster.hardware, cluster.nodes)
    if one is None:
        yours = any(
            key.startswith("trainer.layout.") and origin.startswith(("file ", "--set"))
            for key, origin in resolved.origins.items()
        )
        severity = "note" if yours or default_hardware(recipe) is None else "warning"
        stands = "your layout stands on" if yours else "what follows is"
        message = (
            f"{recipe} has no overlay for {cluster.hardware}: {stands} the recipe's own values, chosen for no device"
        )
        way_out = f"name one of {', '.join(kinds)}, set a layout, or take one of `lockstep plan --suggest`"
        yield Finding("no-overlay", severity, message, way_out, _SOURCE)
        return
    planned = one.changes().get("cluster.nodes", (1, ""))[0] if one.nodes is None else one.nodes
    if planned != cluster.nodes:
        message = f"the overlay for {one.hardware} is of {planned} nodes, and {cluster.nodes} are asked for"
        yield Finding("overlay-nodes", "warning", message, "see `lockstep plan --suggest` for a layout", _SOURCE)


def changes_for(recipe: str, above: Mapping[str, Any], variants: Sequence[str] = ()) -> list[Change]:
    """The layer between a recipe and the files on it: overlay, then variants. ``above``: what those files and ``--set``
    say, which may name the hardware. Where a cluster's recipe has no overlay for it, a node is a whole one. Raises
    ``ConfigError`` for an unknown variant or two that exclude each other."""
    cluster = above.get("cluster")
    said: Mapping[str, Any] = cluster if isinstance(cluster, Mapping) else {}
    hardware = said.get("hardware", default_hardware(recipe))
    changes: list[Change] = []
    if hardware is not None:
        changes.append(Change("cluster.hardware", hardware, f"recipe {recipe}"))
    one = chosen_overlay(recipe, hardware, said.get("nodes")) if isinstance(hardware, str) else None
    if one is not None:
        changes += as_changes(one.changes(), f"overlay {one.hardware}")
    elif hardware in hardware_names() and default_hardware(recipe) is not None and overlays_of(recipe):
        devices = describe_hardware(hardware).gpus_per_node
        changes.append(Change("cluster.gpus_per_node", devices, f"hardware {hardware}: no overlay, devices of a node"))
    for picked in chosen_variants(recipe, variants, hardware):
        changes += as_changes(picked.changes(), f"variant {picked.name}")
    return changes


def chosen_variants(recipe: str, names: Iterable[str], hardware: object) -> list[Variant]:
    """The variants of those names, in their order. Raises ``ConfigError`` with everything that is wrong with them."""
    known = {one.name: one for one in variants_of(recipe)}
    problems: list[Violation] = []
    picked: list[Variant] = []
    for name in names:
        one = known.get(name)
        if one is None:
            near = difflib.get_close_matches(name, known, n=1)
            way_out = f'did you mean "{near[0]}"?' if near else "leave --variant out"
            allowed = ", ".join(known) or "none"
            problems.append(Violation("", f'{recipe or "the file"} has no variant "{name}"', way_out, allowed=allowed))
            continue
        if one.hardware and hardware not in one.hardware:
            message = f'variant "{name}" is for {", ".join(one.hardware)}, not for {hardware}'
            problems.append(Violation("", message, "name one of these with --hardware, or leave the variant out"))
        for other in picked:
            if other.group == one.group and other.name != name:
                message = f'variants "{other.name}" and "{name}" are alternatives ({one.group})'
                problems.append(Violation("", message, "choose one of them"))
        picked.append(one)
    if problems:
        raise ConfigError("--variant", problems)
    return picked
