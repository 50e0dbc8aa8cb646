"""``lockstep plan``: whether a recipe, or another project's launch command, would run on hardware that isn't here.

Exit codes: 0 it keeps every rule and fits, 1 it does not, 2 bad usage or configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli_recipes import (
    HardwareOption,
    JsonOption,
    NodesOption,
    SetOption,
    UnverifiedOption,
    VariantOption,
    load_chosen,
)

if TYPE_CHECKING:
    from lockstep.config.load import ResolvedConfig

EPILOG = (
    "Examples:  lockstep plan deepseek-v4-flash --hardware h200   |   "
    "lockstep plan qwen3-30b-a3b --hardware h100 --nodes 2 --suggest   |   lockstep plan --from run.sh"
)


def plan(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="A recipe's name or a TOML file.")] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A launch command of Megatron, miles or slime, verl, vLLM or SGLang instead of a recipe.",
        ),
    ] = None,
    overrides: SetOption = None,
    hardware: HardwareOption = None,
    nodes: NodesOption = None,
    variants: VariantOption = None,
    unverified: UnverifiedOption = False,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="List other legal layouts, the planner's best first.")
    ] = False,
    sources: Annotated[bool, typer.Option("--sources", help="Print where each argument is defined.")] = False,
    other: Annotated[
        str | None,
        typer.Option("--compare", metavar="OTHER", help="A variant, another recipe or a TOML file: what differs."),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--set-variable", metavar="NAME=VALUE", help="With --from: a shell variable. Repeatable."),
    ] = None,
    installed: Annotated[
        bool,
        typer.Option("--installed", help="With --from: ask the packages that are here who reads each variable (slow)."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Judge a layout without its hardware: rules with repairs, memory by phase, variables, arguments.

    Exits 1 on any violation.
    """
    if (recipe is None) == (script is None):
        raise typer.BadParameter("give a recipe, or --from FILE", param_hint="RECIPE or --from")
    of_recipe = {
        "--set": overrides,
        "--variant": variants,
        "--suggest": suggest,
        "--sources": sources,
        "--compare": other,
    }
    if script is not None:
        _refuse(of_recipe, "does not go with --from")
        raise typer.Exit(_plan_script(script, hardware, nodes, variables or [], installed, as_json=as_json))
    _refuse({"--set-variable": variables, "--installed": installed}, "goes with --from")
    assert recipe is not None
    resolved = load_chosen(recipe, overrides, hardware, nodes, variants, unverified)
    if other is not None:
        _refuse({"--suggest": suggest, "--sources": sources}, "does not go with --compare")
        chosen = (overrides, hardware, nodes, variants, unverified)
        raise typer.Exit(_compared(resolved, recipe, other, chosen, as_json=as_json))
    from lockstep.driver.plan_commands import plan as run

    raise typer.Exit(run(resolved, with_suggestions=suggest, sources=sources, as_json=as_json))


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Raises ``BadParameter`` for the first of the options that is given."""
    for name, given in options.items():
        if given:
            raise typer.BadParameter(why, param_hint=name)


def _compared(resolved: ResolvedConfig, recipe: str, other: str, chosen: Any, *, as_json: bool) -> int:
    """``chosen``: overrides, hardware, nodes, variants and unverified, which hold for both sides."""
    from lockstep.driver.compare_commands import compare, with_variant

    overrides, hardware, nodes, variants, unverified = chosen
    more = with_variant(resolved.recipe, variants or (), other)
    if more is None:
        second = load_chosen(other, overrides, hardware, nodes, variants, unverified)
    else:
        second = load_chosen(recipe, overrides, hardware, nodes, more, unverified)
    return compare((resolved, second), (recipe, other), os.environ, as_json=as_json)


def _plan_script(
    script: Path, hardware: str | None, nodes: int | None, variables: list[str], installed: bool, *, as_json: bool
) -> int:
    from lockstep.driver.launch_commands import plan_launch

    report = plan_launch(script, hardware=hardware, nodes=nodes, variables=variables, installed=installed)
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.text())
    return report.exit_code
