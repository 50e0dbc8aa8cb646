"""The command group ``lockstep refit``. Exit codes as everywhere: 0 done, 1 a claim failed, 2 bad usage."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

refit_app = typer.Typer(help="Prove that an engine computes with the weights that it was given.", no_args_is_help=True)


@refit_app.callback()
def refit() -> None:
    """Prove that an engine computes with the weights that it was given."""


@refit_app.command(
    epilog="Examples:  lockstep refit check tiny-qwen3-moe --engine vllm   |   "
    "lockstep refit check path/to/model --engine torch --dtype bfloat16   |   lockstep refit check quickstart --json"
)
def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model's folder, a recipe's name, or tiny-ARCHITECTURE (random, small)."
        ),
    ],
    engine: Annotated[Literal["torch", "vllm"], typer.Option(help="The engine that is refitted.")] = "torch",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="What both sides compute in.")] = "float32",
    bound: Annotated[
        float | None,
        typer.Option(min=0, help="On the mean difference of log-probs; default 1e-4 in float32, 0.1 in bfloat16."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the probe tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    plain_push: Annotated[bool, typer.Option("--plain-push", hidden=True)] = False,
    without_derived: Annotated[bool, typer.Option("--without-derived", hidden=True)] = False,
) -> None:
    """Refit an engine twice with different weights, and compare what it computes.

    It starts with random weights; the references are transformers' forward and a fresh engine loaded from disk. Exits 1
    with the first module whose output differs. No trainer is used: run it beside yours.
    """
    from lockstep.driver.refit_commands import check as run

    code = run(
        model,
        engine,
        dtype=dtype,
        bound=bound,
        seed=seed,
        plain_push=plain_push,
        derived=not without_derived,
        as_json=as_json,
    )
    raise typer.Exit(code)
