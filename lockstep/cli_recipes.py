"""The command group ``lockstep recipes``, and the options with which a recipe is chosen everywhere.

Exit codes as everywhere: 0 done, 1 a recipe is refused by the check, 2 bad usage.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lockstep.config.load import ResolvedConfig

recipes_app = typer.Typer(help="The catalogue of recipes.", no_args_is_help=True)

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name or a TOML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting (TOML value, else text). Repeatable."),
]
HardwareOption = Annotated[
    str | None,
    typer.Option("--hardware", metavar="KIND", help="The recipe's overlay for this hardware (mi355x, h200, …)."),
]
NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, help="Machines; some hardware has several layouts.")]
VariantOption = Annotated[
    list[str] | None, typer.Option("--variant", metavar="NAME", help="A variant of the recipe. Repeatable.")
]
UnverifiedOption = Annotated[
    bool, typer.Option("--unverified", help="Allow a layout that nobody has shown; kept with the run.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def load_chosen(
    recipe: str,
    overrides: list[str] | None,
    hardware: str | None = None,
    nodes: int | None = None,
    variants: list[str] | None = None,
    unverified: bool = False,
) -> ResolvedConfig:
    """The configuration that the options name."""
    from lockstep.recipes import load_recipe

    return load_recipe(
        recipe,
        overrides or (),
        hardware=hardware,
        nodes=nodes,
        variants=variants or (),
        unverified=unverified,
    )


@recipes_app.command("list", epilog="Example:  lockstep recipes list")
def list_recipes(as_json: JsonOption = False) -> None:
    """List all recipes with their hardware and variants."""
    from lockstep.driver.recipe_commands import listed

    listed(as_json=as_json)


@recipes_app.command(
    epilog="Examples:  lockstep recipes show quickstart > my.toml   |   "
    "lockstep recipes show deepseek-v4-flash --hardware h200 --variant fp8 --json"
)
def show(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    hardware: HardwareOption = None,
    nodes: NodesOption = None,
    variants: VariantOption = None,
    unverified: UnverifiedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved configuration: every key, its value and where the value came from."""
    from lockstep.config.load import dump_resolved
    from lockstep.config.secrets import shown_config

    resolved = load_chosen(recipe, overrides, hardware, nodes, variants, unverified)
    if as_json:
        config = shown_config(resolved.config.model_dump(mode="json"))
        print(json.dumps({"config": config, "origins": resolved.origins}, indent=2))
    else:
        print(dump_resolved(resolved), end="")


@recipes_app.command(
    epilog="Examples:  lockstep recipes diff quickstart my.toml   |   "
    "lockstep recipes diff deepseek-v4-flash --hardware mi355x h200"
)
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A recipe's name or a TOML file.")],
    second: Annotated[str | None, typer.Argument(metavar="B", help="Another one, or --hardware.")] = None,
    hardware: Annotated[
        tuple[str, str] | None, typer.Option("--hardware", metavar="KIND KIND", help="A's overlays for these two.")
    ] = None,
    variants: VariantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what differs between two recipes, or between two kinds of hardware of one, with the reasons."""
    from lockstep.driver.recipe_commands import differences, hardware_differences

    if (second is None) == (hardware is None):
        raise typer.BadParameter("give a second recipe, or two kinds of hardware", param_hint="B or --hardware")
    if hardware is not None:
        hardware_differences(first, hardware, variants or (), as_json=as_json)
    elif second is not None:
        if variants:
            raise typer.BadParameter("goes with --hardware", param_hint="--variant")
        differences(first, second, as_json=as_json)


@recipes_app.command("check", epilog="Example:  lockstep recipes check --json")
def check_recipes(as_json: JsonOption = False) -> None:
    """Load every recipe under every overlay and variant; run all checks, rules, memory plans and ledgers.

    Exits 1 if one is refused.
    """
    from lockstep.driver.recipe_commands import check

    raise typer.Exit(check(as_json=as_json))
