"""``lockstep doctor``: the machine, the shell's stray variables, and what a recipe would need of both."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from lockstep.config.schema import RunConfig
from lockstep.driver.environment import examine, platform_of
from lockstep.driver.needs import needs_of
from lockstep.environment.ledger import LedgerFinding, judge
from lockstep.environment.processes import shell_environment
from lockstep.hardware import doctor
from lockstep.hardware.profile import detect
from lockstep.hardware.visibility import platform_here, visibility_problems


def examine_all(config: RunConfig | None = None) -> dict[str, Any]:
    """The machine's examination with ``variables`` (findings about the shell, and about the recipe's variables) and,
    for a recipe, its ``needs``. A variable that is in the way counts among the problems."""
    result = doctor.examine()
    shell = shell_environment()
    platform = platform_here() if config is None else platform_of(config)
    known = {problem["wrong"] for problem in result["problems"]}
    more = [{"wrong": wrong, "way_out": out} for wrong, out in visibility_problems(os.environ, platform)]
    result["problems"] += [problem for problem in more if problem["wrong"] not in known]
    result["variables"] = [asdict(finding) for finding in _findings(config, shell)]
    if config is not None:
        result |= {"recipe": config.name, "needs": [asdict(need) for need in needs_of(config, detect())]}
    return result


def _findings(config: RunConfig | None, shell: dict[str, str]) -> tuple[LedgerFinding, ...]:
    if config is None:
        return judge({}, shell, platform=platform_here()).findings
    return examine(config, shell, refuse=False).findings


def render_all(result: dict[str, Any]) -> str:
    """All of it as text for a terminal; the verdict on the machine stays last, before the recipe's needs."""
    lines = [LedgerFinding(**finding).text() for finding in result["variables"] if finding["severity"] != "note"]
    text = doctor.render(result)
    parts = ["\n".join(lines), text] if lines else [text]
    if "needs" in result:
        parts.append(_needs(result))
    return "\n\n".join(parts)


def _needs(result: dict[str, Any]) -> str:
    lines = [f"{result['recipe']} needs"]
    for need in result["needs"]:
        lines.append(f"  {'here   ' if need['here'] else 'missing'}  {need['what']}: {need['found']}")
        if not need["here"]:
            lines.append(f"           way out: {need['way_out']}")
    if not result["needs"]:
        lines.append("  nothing besides what is listed above")
    return "\n".join(lines)
