"""The command line: each command is a thin call of one function, imported only when it runs.

Exit codes: 0 done, 1 a gate, check or claim failed, 2 bad usage or configuration. Logs go to stderr, results to
stdout. An unexpected error keeps its traceback.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep import __version__
from lockstep.cli_lanes import lanes_app
from lockstep.cli_parity import demo_app, parity_app
from lockstep.cli_plan import EPILOG as PLAN_EPILOG
from lockstep.cli_plan import plan
from lockstep.cli_prepare import EPILOG, prepare
from lockstep.cli_recipes import (
    HardwareOption,
    JsonOption,
    NodesOption,
    RecipeArgument,
    SetOption,
    UnverifiedOption,
    VariantOption,
    load_chosen,
    recipes_app,
)
from lockstep.cli_refit import refit_app

EXIT_FAILED, EXIT_USAGE = 1, 2

TOLD_ERRORS = {
    ("lockstep.config.errors", "ConfigError"): EXIT_USAGE,
    ("lockstep.model.load", "ModelError"): EXIT_USAGE,
    ("lockstep.tasks.errors", "TaskError"): EXIT_USAGE,
    ("lockstep.metrics.run_folder", "RunFolderError"): EXIT_USAGE,
    ("lockstep.metrics.checkpoints", "CheckpointError"): EXIT_FAILED,
    ("lockstep.checkpoint.errors", "CheckpointError"): EXIT_FAILED,
    ("lockstep.train.checkpoint", "TrainerStateError"): EXIT_FAILED,
    ("lockstep.train.optimizer", "GradientError"): EXIT_FAILED,
    ("lockstep.train.routing_replay", "RoutingReplayError"): EXIT_FAILED,
    ("lockstep.refit.transaction", "RefitError"): EXIT_FAILED,
    ("lockstep.rollout.vllm_start", "EngineUnavailable"): EXIT_USAGE,
    ("lockstep.rollout.process_link", "EngineProcessError"): EXIT_FAILED,
    ("lockstep.driver.groups", "GroupError"): EXIT_FAILED,
    ("lockstep.driver.idle", "IdleError"): EXIT_FAILED,
    ("lockstep.driver.evidence", "ReplayError"): EXIT_FAILED,
    ("lockstep.parity.factors", "FactorError"): EXIT_USAGE,
    ("lockstep.parity.attribute", "SearchError"): EXIT_USAGE,
    ("lockstep.lanes.errors", "LanesError"): EXIT_USAGE,
}
"""Errors whose text says what was wrong and what would be right: it is shown without a traceback, with this exit code.
By name, since importing them takes seconds that ``--help`` has not."""

app = typer.Typer(
    name="lockstep",
    help="RL post-training in which the trainer and the rollout engine are proved to run the same policy.",
    epilog="A first run on two CPU cores: lockstep train quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(recipes_app, name="recipes")
app.add_typer(parity_app, name="parity")
app.add_typer(demo_app, name="demo")
app.add_typer(refit_app, name="refit")
app.add_typer(lanes_app, name="lanes")
app.command(epilog=EPILOG)(prepare)
app.command(epilog=PLAN_EPILOG)(plan)

RunDirArgument = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", exists=True, file_okay=False, help="The folder of a run.")
]


def main() -> None:
    """Entry point of the ``lockstep`` command."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' progress bars would tear the step lines apart
    try:
        app()
    except Exception as error:
        bases = [(base.__module__, base.__name__) for base in type(error).__mro__]
        codes = [TOLD_ERRORS[base] for base in bases if base in TOLD_ERRORS]
        if not codes:
            raise
        print(error, file=sys.stderr)
        sys.exit(codes[0])


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lockstep {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before any command."""
    del version  # its callback has acted on it


@app.command(epilog="Examples:  lockstep doctor   |   lockstep doctor --recipe qwen3-4b   |   lockstep doctor --json")
def doctor(
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="RECIPE", help="Say what this recipe needs and what is missing.")
    ] = None,
    overrides: SetOption = None,
    hardware: HardwareOption = None,
    nodes: NodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show hardware, engines and versions, what was chosen and why, what is possible, and stray variables.

    Exits 1 with the way out if something needed is missing.
    """
    from lockstep.driver.doctor_commands import examine_all, render_all

    wanted = None if recipe is None else load_chosen(recipe, overrides, hardware, nodes, None, False).config
    result = examine_all(wanted)
    print(json.dumps(result, indent=2) if as_json else render_all(result))
    if result["problems"] or any(not need["here"] for need in result.get("needs", ())):
        raise typer.Exit(EXIT_FAILED)


@app.command(
    epilog="Examples:  lockstep train quickstart   |   "
    "lockstep train my.toml --set trainer.learning_rate=1e-5 --run-dir runs/mine"
)
def train(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    hardware: HardwareOption = None,
    nodes: NodesOption = None,
    variants: VariantOption = None,
    unverified: UnverifiedOption = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Where the run is kept; resumed if it exists.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each step's metrics as one JSON object a line.")
    ] = False,
) -> None:
    """Run a recipe, or resume it: one line per step with reward, agreement, verdict and refit.

    Ctrl-C finishes the step, saves and says how to resume; a second one stops at once.
    """
    resolved = load_chosen(recipe, overrides, hardware, nodes, variants, unverified)
    from lockstep.driver.runnable import refuse_to_run

    refuse_to_run(resolved.config)
    from lockstep.driver.environment import launched

    with launched(resolved.config):  # before torch is imported, because some variables are read then
        from lockstep.loop import train as run

        raise typer.Exit(run(resolved, run_dir, as_json=as_json))


@app.command(epilog="Example:  lockstep report runs/quickstart")
def report(run_dir: RunDirArgument) -> None:
    """Write the run's report, one self-contained HTML page, and print its path."""
    from lockstep.metrics.report import write_report

    print(write_report(run_dir))


@app.command(
    epilog="Examples:  lockstep export runs/quickstart out/model   |   lockstep export runs/q out/model --step 11"
)
def export(
    run_dir: RunDirArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist or be empty.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="A checkpoint's step; default: the last.")] = None,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise typer.BadParameter(f"{out} exists and is not an empty folder", param_hint="OUT")
    from lockstep.loop import export as write

    print(write(run_dir, out, step))
    if not (out / "tokenizer_config.json").exists():
        print("no tokenizer was written: that of a random model has no Hugging Face format", file=sys.stderr)


if __name__ == "__main__":
    main()
