"""The command group ``lockstep parity`` that asks where a disagreement of trainer and engine comes from, and ``demo``.

Exit codes as everywhere: 0 done, 1 a bound is exceeded or a cause not found, 2 bad usage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.cli_recorded import EPILOG as REPORT_EPILOG
from lockstep.cli_recorded import report_recorded

parity_app = typer.Typer(help="Measure, replay and explain how far trainer and engine are apart.", no_args_is_help=True)
demo_app = typer.Typer(help="Stories with numbers: a planted fault, and how it is caught.", no_args_is_help=True)

parity_app.command("report", epilog=REPORT_EPILOG)(report_recorded)

TargetArgument = Annotated[
    str, typer.Argument(metavar="RECIPE|RUN", help="A recipe (a batch is sampled now) or a run's folder (recorded).")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", exists=True, file_okay=False, help="The folder of a run.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting of the recipe. Repeatable.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", min=1, help="Step of a run whose batch is used; default: the last recorded.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


@parity_app.command(
    epilog="Examples:  lockstep parity measure tiny-qwen3-moe   |   lockstep parity measure runs/gate --json"
)
def measure(
    target: TargetArgument, overrides: SetOption = None, step: StepOption = None, as_json: JsonOption = False
) -> None:
    """Compare the pairs that isolate causes: sampler, cache, refit, kernels, packing.

    Exits 1 if a pair is above the bound.
    """
    from lockstep.driver.parity_commands import measure as run

    raise typer.Exit(run(target, overrides or (), step, as_json=as_json))


@parity_app.command(
    epilog="Examples:  lockstep parity replay runs/gate 1   |   "
    "lockstep parity replay runs/gate 1 --dtype float32 --path prefill"
)
def replay(
    run_dir: RunArgument,
    step: Annotated[int, typer.Argument(metavar="STEP", min=1, help="The step whose batch is scored again.")],
    engine: Annotated[
        Literal["torch", "vllm", "trainer"],
        typer.Option(help="Score by the embedded engine, by vLLM (in its environment), or by the trainer's forward."),
    ] = "torch",
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, typer.Option(help="Compute in this dtype; default: the run's.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: the run's.")] = None,
    path: Annotated[
        Literal["decode", "prefill"], typer.Option(help="Token by token over the cache, or in one prefill.")
    ] = "decode",
    as_json: JsonOption = False,
) -> None:
    """Score a recorded batch again without the loop, at the version that sampled it.

    Prints how far the new scores are from what trainer and engine recorded.
    """
    from lockstep.driver.parity_commands import replay as run

    raise typer.Exit(run(run_dir, step, engine=engine, dtype=dtype, device=device, path=path, as_json=as_json))


@parity_app.command(
    epilog="Examples:  lockstep parity attribute runs/gate   |   "
    "lockstep parity attribute runs/gate --factor load --factor SOME_SWITCH=0 --budget 20"
)
def attribute(
    target: TargetArgument,
    overrides: SetOption = None,
    step: StepOption = None,
    factors: Annotated[
        list[str] | None,
        typer.Option("--factor", metavar="NAME", help="Only these factors; NAME=VALUE is a variable. Repeatable."),
    ] = None,
    budget: Annotated[int, typer.Option(min=2, help="Most scoring runs.")] = 40,
    full: Annotated[bool, typer.Option("--full", help="Every subset of the factors instead of a search.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the cause of a failing agreement: re-score under one changed factor, then joint ones.

    Exits 1 if the cause is outside the factors (unexplained).
    """
    from lockstep.driver.parity_commands import find_cause

    raise typer.Exit(
        find_cause(target, overrides or (), step, factors=factors or (), budget=budget, full=full, as_json=as_json)
    )


@demo_app.command("stale-refit", epilog="Example:  lockstep demo stale-refit")
def stale_refit(
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", metavar="DIR", help="A new folder for its run."),
    ] = None,
) -> None:
    """A weight update that silently drops a layer: caught by the receipt, or else by the gate and named.

    Takes about a minute on two cores. The fault is planted by the demo; exits 1 if it is not caught.
    """
    from lockstep.demo import stale_refit as run

    raise typer.Exit(run(run_dir))
