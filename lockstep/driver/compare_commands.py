"""``lockstep plan RECIPE --compare OTHER``: what two plans differ in, with the reasons, and what that costs.

first, second ──overlay_rows──► settings that differ, each side's reason
              ──plan_memory───► phases and items that differ, largest first; which fractions fit, and why
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.config.load import ResolvedConfig
from lockstep.driver.plan_commands import EXIT_DONE, EXIT_FAILED, RecipePlan, headline, make_plan, verdict
from lockstep.driver.recipe_commands import overlay_rows
from lockstep.recipes.overlays import variants_of
from lockstep.topology.memory import compare_plans
from lockstep.topology.memory_explain import explain_fractions
from lockstep.topology.memory_records import MemoryPlan


def with_variant(recipe: str, variants: Sequence[str], other: str) -> list[str] | None:
    """The variants of a recipe's plan that ``other`` is compared by: those given, without what it excludes, and
    ``other``. None where it is no variant of the recipe: then it names another recipe or file."""
    known = {one.name: one for one in variants_of(recipe)}
    if other not in known:
        return None
    group = known[other].group
    return [*(name for name in variants if name not in known or known[name].group != group), other]


def compare(sides: Sequence[ResolvedConfig], names: Sequence[str], shell: Mapping[str, str], *, as_json: bool) -> int:
    """Print how two plans differ. Returns the exit code: 1 where one of them has a violation. Raises ``ConfigError`` as
    ``make_plan``."""
    first, second = (make_plan(side, shell) for side in sides)
    rows = overlay_rows(sides)
    if as_json:
        print(json.dumps(_data((first, second), names, rows), indent=2))
    else:
        print("\n".join(_lines((first, second), names, rows)))
    return EXIT_FAILED if first.errors or second.errors else EXIT_DONE


def _lines(
    plans: Sequence[RecipePlan], names: Sequence[str], rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[str]:
    lines: list[str] = []
    for name, plan in zip(names, plans, strict=True):
        lines += [f"{name}: {verdict(plan)}", *(f"  {line.strip()}" for line in headline(plan.job))]
    lines += ["", "settings that differ:" if rows else "settings that differ: none"]
    for key, sides in rows.items():
        lines.append(f"  {key}")
        lines += [f"    {n}: {json.dumps(s['value'])}  ({s['why']})" for n, s in zip(names, sides, strict=True)]
    compared = compare_plans(plans[0].memory, plans[1].memory).splitlines()[1:]
    lines += ["", f"memory, {names[0]} → {names[1]}:", *(f"  {line}" for line in compared)]
    if why := _why(plans, names):
        lines += ["", "what fits:", *(f"  {line}" for line in why)]
    return lines


def _why(plans: Sequence[RecipePlan], names: Sequence[str]) -> list[str]:
    """What fractions and offload of two jobs leave free, where their memory differs."""
    before, after = (replace(plan.job, name=name) for name, plan in zip(names, plans, strict=True))
    return explain_fractions(before, after) if plans[0].memory.phases != plans[1].memory.phases else []


def _data(plans: Sequence[RecipePlan], names: Sequence[str], rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    return {
        "plans": {
            name: {"passes": not plan.errors, "phases": _phases(plan.memory), "kv_tokens": plan.memory.kv_tokens}
            for name, plan in zip(names, plans, strict=True)
        },
        "settings": {key: dict(zip(names, sides, strict=True)) for key, sides in rows.items()},
        "memory": compare_plans(plans[0].memory, plans[1].memory).splitlines()[1:],
        "what_fits": _why(plans, names),
    }


def _phases(memory: MemoryPlan) -> list[dict[str, Any]]:
    return [
        {
            "phase": phase.phase,
            "devices": phase.devices,
            "total_bytes": phase.total_bytes,
            "items": {f"{item.owner} {item.name}": item.num_bytes for item in phase.items},
        }
        for phase in memory.phases
    ]
