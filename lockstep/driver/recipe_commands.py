"""What ``lockstep recipes`` prints: the catalogue, differences between recipes and between hardware, and the check of
every recipe under every overlay and variant."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.load import ResolvedConfig, flatten
from lockstep.recipes import find_recipe, load_recipe, recipe_names
from lockstep.recipes.overlays import Overlay, chosen_overlay, default_hardware, overlays_of, variants_of

_ABSENT = "(no such key)"
HARDWARE = "cluster.hardware"


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run a recipe: its overlay, and the variants that differ from the recipe as it stands."""

    recipe: str
    hardware: str | None = None
    nodes: int | None = None
    variants: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """ "mi355x, 12 nodes, fp8 + deterministic"; "as it stands" where nothing is chosen."""
        nodes = None if self.nodes is None else f"{self.nodes} nodes"
        parts = (self.hardware, nodes, " + ".join(self.variants))
        return ", ".join(part for part in parts if part) or "as it stands"

    def load(self) -> ResolvedConfig:
        """Its configuration. Raises ``ConfigError``."""
        return load_recipe(self.recipe, hardware=self.hardware, nodes=self.nodes, variants=self.variants)


@dataclass(slots=True)
class Checked:
    """What was found of a recipe: its cases, and the problems of each."""

    cases: list[Case] = field(default_factory=list)
    problems: list[tuple[Case, str]] = field(default_factory=list)


def cases_of(recipe: str) -> Iterator[Case]:
    """Every overlay of a recipe, and the recipe without one where that is for the machine at hand; each alone and with
    every set of variants that are for its hardware and no alternatives."""
    places: list[tuple[str | None, int | None]] = [(one.hardware, one.nodes) for one in overlays_of(recipe)]
    if not places or default_hardware(recipe) is None:
        places.insert(0, (None, None))
    for hardware, nodes in places:
        groups: dict[str, list[tuple[str, ...]]] = {}
        for variant in variants_of(recipe):
            if variant.changes() and (not variant.hardware or hardware in variant.hardware):
                groups.setdefault(variant.group, [()]).append((variant.name,))
        for chosen in itertools.product(*groups.values()):
            yield Case(recipe, hardware, nodes, sum(chosen, ()))


def check_recipes() -> dict[str, Checked]:
    """Load every recipe in every case and hold it to the rules, the memory plan and the ledger of variables, whatever
    the shell has set."""
    from lockstep.driver.plan_commands import make_plan

    found: dict[str, Checked] = {}
    for name in recipe_names():
        checked = found[name] = Checked()
        for case in cases_of(name):
            checked.cases.append(case)
            try:
                made = make_plan(case.load(), {})
            except ConfigError as error:
                checked.problems += [(case, violation.text()) for violation in error.violations]
                continue
            checked.problems += [(case, finding.text()) for finding in made.errors]
    return found


def check(*, as_json: bool) -> int:
    """Print ``check_recipes``. Returns the exit code: 1 if a recipe is refused, or there is none."""
    found = check_recipes()
    if as_json:
        texts = {name: [f"{case.label}: {text}" for case, text in one.problems] for name, one in found.items()}
        print(json.dumps(texts, indent=2))
    else:
        for name, one in found.items():
            labels = "; ".join(case.label for case in one.cases)
            print(f"{name}: {'refused' if one.problems else 'ok'} ({labels})")
            for case, text in one.problems:
                print(f"\n  {case.label}:\n{text}\n")
    return 0 if found and not any(one.problems for one in found.values()) else 1


def listed(*, as_json: bool) -> None:
    """Print every recipe with its description, hardware and variants."""
    described = {name: find_recipe(name).description for name in recipe_names()}
    if as_json:
        print(json.dumps(described, indent=2))
        return
    width = max((len(name) for name in described), default=0)
    for name, description in described.items():
        print(f"{name:{width}}  {description}")
        hardware = [_place(one, default_hardware(name)) for one in overlays_of(name)]
        variants = [one.name for one in variants_of(name) if one.changes()]
        for title, words in (("hardware", hardware), ("variants", variants)):
            if words:
                print(f"{'':{width}}    {title}: {', '.join(words)}")


def _place(one: Overlay, default: str | None) -> str:
    nodes = "" if one.nodes is None else f" with {one.nodes} nodes"
    return f"{one.hardware}{nodes}" + (" (default)" if one.hardware == default and not nodes else "")


def differences(first: str, second: str, *, as_json: bool) -> None:
    """Print the keys in which two recipes differ, with both values."""
    sides = [flatten(load_recipe(name).config) for name in (first, second)]
    keys = [key for key in sides[0] | sides[1] if sides[0].get(key, _ABSENT) != sides[1].get(key, _ABSENT)]
    if as_json:
        print(json.dumps({key: [side.get(key) for side in sides] for key in keys}, indent=2))
        return
    for key in keys:
        print(key)
        for name, side in zip((first, second), sides, strict=True):
            print(f"  {name}: {json.dumps(side[key]) if key in side else _ABSENT}")


def hardware_differences(recipe: str, pair: Sequence[str], variants: Sequence[str], *, as_json: bool) -> None:
    """Print what a recipe's overlays for two kinds of hardware make different, each value with its reason. Raises
    ``ConfigError`` where there is no overlay."""
    find_recipe(recipe)
    for hardware in pair:
        if chosen_overlay(recipe, hardware, None) is None:
            have = ", ".join(dict.fromkeys(one.hardware for one in overlays_of(recipe))) or "none"
            message = f"{recipe} has no overlay for {hardware}"
            raise ConfigError("--hardware", [Violation("", message, "name one of these", allowed=have)])
    sides = [load_recipe(recipe, hardware=hardware, variants=variants) for hardware in pair]
    rows = overlay_rows(sides)
    if as_json:
        print(json.dumps({key: dict(zip(pair, values, strict=True)) for key, values in rows.items()}, indent=2))
        return
    for key, values in rows.items():
        print(key)
        for hardware, value in zip(pair, values, strict=True):
            print(f"  {hardware}: {json.dumps(value['value'])}  ({value['why']})")


def overlay_rows(sides: Sequence[ResolvedConfig]) -> dict[str, list[Mapping[str, Any]]]:
    """Key → value and reason on each side, for every key that differs but the hardware's own. A key without a reason of
    its own is the recipe's."""
    flat = [flatten(side.config) for side in sides]
    keys = [key for key in flat[0] | flat[1] if flat[0].get(key, {}) != flat[1].get(key, {}) and key != HARDWARE]
    return {
        key: [
            {"value": values.get(key), "why": why(side.origins.get(key, "default")) if key in values else "not set"}
            for values, side in zip(flat, sides, strict=True)
        ]
        for key in keys
    }


def why(origin: str) -> str:
    """The reason in an origin: "overlay h200: eight stages" → "eight stages"."""
    what, colon, reason = origin.partition(": ")
    return reason if colon and what.startswith(("overlay ", "variant ")) else origin
