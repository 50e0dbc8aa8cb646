"""The command group ``lockstep lanes``. Exit codes as everywhere: 0 done, 1 a plan or verdict is red, 2 bad usage."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

lanes_app = typer.Typer(help="Hardware lanes: what runs where, what ran, and what is owed.", no_args_is_help=True)

RootOption = Annotated[
    Path, typer.Option("--root", metavar="DIR", exists=True, file_okay=False, help="The project, with its lanes.toml.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
EvidenceOption = Annotated[
    list[Path] | None,
    typer.Option("--evidence", metavar="DIR", help="Where evidence lies; default: of lanes.toml. Repeatable."),
]
PlanOption = Annotated[Path, typer.Option("--plan", metavar="FILE", help="A plan's JSON.")]
StageOption = Annotated[str, typer.Option("--stage", metavar="STAGE", help="A stage of the catalogue.")]
ResultsOption = Annotated[
    str, typer.Option("--results", metavar="JSON", help='Result by stage, or GitHub\'s "needs" object as JSON.')
]


@lanes_app.command(
    epilog="Examples:  lockstep lanes plan --labels run-amd,replay --changed-since main   |   "
    "lockstep lanes plan --stage nightly --json"
)
def plan(
    labels: Annotated[str, typer.Option("--labels", metavar="A,B", help="Labels of the pull request.")] = "",
    changed_since: Annotated[
        str | None, typer.Option("--changed-since", metavar="COMMIT", help="Select what these changes reach.")
    ] = None,
    stage: Annotated[list[str] | None, typer.Option("--stage", help="Only this stage. Repeatable.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan's JSON here too.")] = None,
    online: Annotated[
        Path | None,
        typer.Option("--online", metavar="FILE", help="GitHub's list of runners as JSON: a lane without one is red."),
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect/--no-collect", help="Ask pytest whether it collects what is registered.")
    ] = True,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for each test.")] = False,
    root: RootOption = Path(),
    as_json: JsonOption = False,
) -> None:
    """Plan: which tests, on which runner, in which shard, with a reason for each selected and each skipped one.

    Exits 1 if the plan is red: an expired disable, a registered test that collects nothing, a lane without runners, an
    illegal layout, or nothing selected.
    """
    from lockstep.lanes.commands import plan_project
    from lockstep.lanes.files import write_text
    from lockstep.lanes.render import render_plan

    names = tuple(name for name in (part.strip() for part in labels.split(",")) if name)
    made = plan_project(root, names, changed_since, tuple(stage or ()), online, collect=collect)
    if out is not None:
        write_text(out, made.to_json() + "\n")
    print(made.to_json() if as_json else render_plan(made, verbose=verbose))
    if made.problems:
        raise typer.Exit(1)


@lanes_app.command(epilog="Example:  lockstep lanes matrix --plan plan.json --stage one-gpu --vendor cuda")
def matrix(
    plan_file: PlanOption,
    stage: StageOption,
    vendor: Annotated[list[str] | None, typer.Option("--vendor", help="Only cpu, cuda or rocm. Repeatable.")] = None,
) -> None:
    """Print a stage's jobs as one line of JSON, for a workflow's matrix."""
    from lockstep.lanes.plan import Plan
    from lockstep.lanes.plan import matrix as of_stage

    print(json.dumps(of_stage(Plan.read(plan_file), stage, tuple(vendor or ()))))


@lanes_app.command(
    epilog='Example:  lockstep lanes gate --plan plan.json --stage one-gpu --results \'{"cpu": "success"}\''
)
def gate(plan_file: PlanOption, stage: StageOption, results: ResultsOption) -> None:
    """Print start=true or start=false: whether a stage may start after these results. The reason goes to stderr."""
    from lockstep.lanes.commands import read_results
    from lockstep.lanes.plan import Plan
    from lockstep.lanes.verdict import may_start

    made = Plan.read(plan_file)
    start, reason = may_start(made, stage, read_results(results, made.stages))
    print(reason, file=sys.stderr)
    print(f"start={'true' if start else 'false'}")


@lanes_app.command(epilog="Example:  lockstep lanes verdict --plan plan.json --evidence out/evidence")
def verdict(
    plan_file: PlanOption, evidence: EvidenceOption = None, root: RootOption = Path(), as_json: JsonOption = False
) -> None:
    """Compare a plan with the evidence: exits 1 for what was planned and did not run, ran twice, or failed."""
    from lockstep.lanes.commands import load_runs
    from lockstep.lanes.plan import Plan
    from lockstep.lanes.verdict import check_runs

    made = Plan.read(plan_file)
    problems = check_runs(made, load_runs(root, evidence))
    if as_json:
        print(json.dumps({"green": not problems, "problems": problems}, indent=1))
    else:
        num_tests = sum(len(job.tests) for job in made.jobs)
        print("\n".join(problems) or f"green: {num_tests} tests in {len(made.jobs)} jobs ran as planned")
    if problems:
        raise typer.Exit(1)


@lanes_app.command(epilog="Example:  lockstep lanes status --json")
def status(evidence: EvidenceOption = None, root: RootOption = Path(), as_json: JsonOption = False) -> None:
    """Show for each recipe and hardware the last real run with its values, or that there was none, and why."""
    from lockstep.lanes.commands import project_status
    from lockstep.lanes.render import render_status

    rows = project_status(root, evidence)
    print(json.dumps([asdict(row) for row in rows], indent=1) if as_json else render_status(rows))


@lanes_app.command(epilog="Example:  lockstep lanes debt")
def debt(evidence: EvidenceOption = None, root: RootOption = Path(), as_json: JsonOption = False) -> None:
    """List what is disabled, flaky, mis-estimated, never run or orphaned."""
    from lockstep.lanes.commands import project_debt
    from lockstep.lanes.render import render_debt

    found = project_debt(root, evidence)
    print(json.dumps([asdict(one) for one in found], indent=1) if as_json else render_debt(found))


@lanes_app.command(epilog="Example:  lockstep lanes history results/junit.xml --hardware h200")
def history(
    junit: Annotated[list[Path], typer.Argument(metavar="FILE...", exists=True, dir_okay=False, help="JUnit XML.")],
    hardware: Annotated[str, typer.Option("--hardware", metavar="MODEL", help="Where these ran: cpu, h200, …")],
    root: RootOption = Path(),
) -> None:
    """Add measured times to the history, smoothed, and report estimates that are off by more than two."""
    from lockstep.lanes.commands import update_history

    lines = update_history(root, junit, hardware)
    print("\n".join(lines))


@lanes_app.command(epilog="Example:  lockstep lanes coverage --write README.md")
def coverage(
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", exists=True, help="Replace the block in this document.")
    ] = None,
    evidence: EvidenceOption = None,
    root: RootOption = Path(),
) -> None:
    """Print the share of declared tests whose last real run passed, by hardware, as the README's block."""
    from lockstep.lanes.commands import coverage_text
    from lockstep.lanes.status import replace_block

    block = coverage_text(root, evidence)
    if write is not None:
        write.write_text(replace_block(write.read_text(encoding="utf-8"), block), encoding="utf-8")
    print(block)
