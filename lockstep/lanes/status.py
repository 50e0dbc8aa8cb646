"""What is known of each recipe and declared test by hardware: the last real run with its values, or that none was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

from lockstep.lanes.changes import git
from lockstep.lanes.declare import CPU, Case
from lockstep.lanes.errors import LanesError
from lockstep.lanes.evidence import Gate, Result, Run
from lockstep.lanes.files import load_function
from lockstep.lanes.plan import Project

State = Literal["passed", "failed", "never ran", "disabled", "expired", "no test"]
CaseKey = tuple[str, str]
"""(test id, hardware)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the status. ``subject``: a recipe's name, else a test id. ``detail``: date, values, or why not."""

    subject: str
    hardware: str
    test_id: str
    state: State
    detail: str


def last_results(runs: Iterable[Run]) -> dict[CaseKey, tuple[Run, Result]]:
    """The newest run in which each test really ran (passed or failed), by test and hardware; ``runs`` oldest first."""
    return {
        (result.test_id, run.hardware): (run, result)
        for run in runs
        for result in run.tests
        if result.outcome != "skipped"
    }


def recipe_names(project: Project) -> list[str]:
    """Names of the project's recipes, through the catalogue's ``recipes``; empty without."""
    spec = project.catalogue.recipes
    return [] if spec is None else [str(name) for name in load_function(spec, project.root)()]


def status(project: Project, runs: Sequence[Run], recipes: Sequence[str], today: date) -> list[Row]:
    """A row for each declared case, and for each recipe and hardware that no case covers; sorted by subject."""
    last = last_results(runs)
    declared = [case for case in project.cases if case.declared]
    rows = [_row(case, last.get((case.test_id, case.hardware)), project.root, today) for case in declared]
    covered = {(case.recipe, case.hardware) for case in declared}
    every = [CPU, *project.catalogue.hardware]
    rows += [
        Row(recipe, hardware, "", "no test", "no test declares this recipe here")
        for recipe in recipes
        for hardware in every
        if (recipe, hardware) not in covered
    ]
    return sorted(rows, key=lambda row: (row.subject, every.index(row.hardware), row.test_id))


def _row(case: Case, last: tuple[Run, Result] | None, root: Path, today: date) -> Row:
    subject = case.recipe or case.test_id
    off = case.disabled
    if off is not None:
        since, by = disabled_since(root, case.path, off.reason)
        detail = f"disabled since {since} by {by}, expires {off.expires}: {off.reason} ({off.issue})"
        return Row(subject, case.hardware, case.test_id, "expired" if off.expired(today) else "disabled", detail)
    if last is None:
        return Row(subject, case.hardware, case.test_id, "never ran", "no evidence of a run")
    run, result = last
    gates = gates_text(result.gates)
    devices = f"{len(run.devices)} × {run.devices[0]}" if run.devices else "CPU"
    detail = f"{run.started[:10]} at {run.commit[:10]} on {devices}, {result.minutes:.2g} min: {gates}"
    if result.outcome == "failed":
        return Row(subject, case.hardware, case.test_id, "failed", f"{detail}; {result.why}")
    return Row(subject, case.hardware, case.test_id, "passed", detail)


def gates_text(gates: Sequence[Gate]) -> str:
    """Each gate once, with the value that is nearest to its bound or farthest beyond it, and how often it was taken."""
    by_name: dict[str, list[Gate]] = {}
    for gate in gates:
        by_name.setdefault(gate.name, []).append(gate)
    texts: list[str] = []
    for own in by_name.values():
        worst = min(own, key=lambda gate: (gate.passed, -gate.value if gate.sense == "at_most" else gate.value))
        texts.append(f"{worst.text()} ({len(own)} times)" if len(own) > 1 else worst.text())
    return ", ".join(texts) or "no gate recorded"


def disabled_since(root: Path, path: str, reason: str) -> tuple[str, str]:
    """(date, author) of the first commit in which the file had this reason; words that say so if there is none."""
    try:
        lines = git(root, "log", "--reverse", "--format=%as%x09%an", f"-S{reason}", "--", path).splitlines()
    except LanesError:
        lines = []
    first, _, author = lines[0].partition("\t") if lines else ("an unknown day", "", "an author not committed yet")
    return first, author


def coverage(project: Project, runs: Sequence[Run]) -> dict[str, Mapping[str, int]]:
    """Counts by accelerator: declared, enabled, and those whose last real run passed. A CPU everybody has."""
    last = last_results(runs)
    table: dict[str, Mapping[str, int]] = {}
    for hardware in project.catalogue.hardware:
        own = [case for case in project.cases if case.declared and case.hardware == hardware]
        enabled = [case for case in own if case.disabled is None]
        results = [last.get((case.test_id, hardware)) for case in enabled]
        passed = sum(1 for one in results if one is not None and one[1].outcome == "passed")
        table[hardware] = {"declared": len(own), "enabled": len(enabled), "passed": passed}
    return table


BEGIN, END = "<!-- lanes-coverage:begin -->", "<!-- lanes-coverage:end -->"


def coverage_block(project: Project, runs: Sequence[Run]) -> str:
    """The README's block: a Markdown table between its marks. Written by ``lockstep lanes coverage --write``."""
    lines = [BEGIN, "| hardware | declared tests | enabled | last run passed | coverage |", "|---|---|---|---|---|"]
    for hardware, counts in coverage(project, runs).items():
        declared = counts["declared"]
        share = f"{100 * counts['passed'] / declared:.0f} %" if declared else "no test"
        lines.append(f"| {hardware} | {declared} | {counts['enabled']} | {counts['passed']} | {share} |")
    return "\n".join([*lines, END])


def replace_block(text: str, block: str) -> str:
    """A document with its coverage block replaced. Raises ``LanesError`` if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise LanesError(f"no coverage block: put the lines {BEGIN} and {END} where it belongs")
    return before + block + after
