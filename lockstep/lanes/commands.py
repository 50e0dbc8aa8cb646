"""What the commands do: read a project, its evidence and a workflow's results, and ask the modules beside this one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from lockstep.lanes.catalogue import load_catalogue
from lockstep.lanes.collect import collect as collect_cases
from lockstep.lanes.debt import Debt, debt
from lockstep.lanes.declare import CPU
from lockstep.lanes.errors import LanesError
from lockstep.lanes.evidence import Run, read_runs
from lockstep.lanes.history import drifts, load_history, read_junit, save_history
from lockstep.lanes.plan import Plan, make_plan, read_project
from lockstep.lanes.status import Row, coverage_block, recipe_names, status

WORST_FIRST = ("failure", "cancelled", "success", "skipped")
"""Results of a stage's jobs; a stage of which one job ran and another had nothing to run has succeeded."""


def today() -> date:
    """The date in UTC, on which disables expire everywhere at once."""
    return datetime.now(UTC).date()


def plan_project(
    root: Path,
    labels: Sequence[str],
    changed_since: str | None,
    stages: Sequence[str],
    online: Path | None,
    *,
    collect: bool,
) -> Plan:
    """The plan of the project in ``root``; ``online`` is a file with GitHub's answer to ``actions/runners``."""
    project = read_project(root.resolve())
    machines = None if online is None else read_online(online)
    collection = collect_cases(project.root, project.cases, project.catalogue.lanes) if collect else None
    return make_plan(
        project, labels=labels, changed_since=changed_since, stages=stages, today=today(), online=machines,
        collection=collection,
    )  # fmt: skip


def read_online(path: Path) -> list[frozenset[str]]:
    """Labels of each machine that is online. Raises ``LanesError``."""
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        runners = [one for one in table["runners"] if one["status"] == "online"]
        return [frozenset(str(label["name"]) for label in one["labels"]) for one in runners]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LanesError(
            f"{path} is not GitHub's list of runners ({error!r}): gh api repos/OWNER/NAME/actions/runners"
        ) from None


def read_results(text: str, stages: Sequence[str]) -> dict[str, str]:
    """Result by stage from ``{"cpu": "success"}`` or GitHub's ``{"cpu": {"result": "success", …}}``.

    Jobs named ``STAGE-…`` count for their stage, of which the worst result holds; other jobs are left out. Raises
    ``LanesError``.
    """
    try:
        table: dict[str, Any] = json.loads(text)
        jobs = {name: one if isinstance(one, str) else one["result"] for name, one in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LanesError(
            f'--results: expected {{"cpu": "success"}} or toJSON(needs), got {text[:80]!r} ({error!r})'
        ) from None
    results: dict[str, str] = {}
    for stage in stages:
        of_stage = [result for name, result in jobs.items() if name == stage or name.startswith(f"{stage}-")]
        if of_stage:
            results[stage] = min(of_stage, key=lambda one: WORST_FIRST.index(one) if one in WORST_FIRST else -1)
    return results


def load_runs(root: Path, evidence: Sequence[Path] | None) -> list[Run]:
    """Runs from these folders; None: from the catalogue's. A folder named and not there is an error."""
    if evidence is None:
        return read_runs([root / load_catalogue(root).evidence])
    missing = [str(folder) for folder in evidence if not folder.is_dir()]
    if missing:
        raise LanesError(f"no evidence folder {', '.join(missing)}")
    return read_runs(evidence)


def project_status(root: Path, evidence: Sequence[Path] | None) -> list[Row]:
    """Rows of ``lanes status``."""
    project = read_project(root.resolve())
    return status(project, load_runs(root, evidence), recipe_names(project), today())


def project_debt(root: Path, evidence: Sequence[Path] | None) -> list[Debt]:
    """Items of ``lanes debt``."""
    project = read_project(root.resolve())
    return debt(project, load_runs(root, evidence), recipe_names(project), today())


def update_history(root: Path, junit: Sequence[Path], hardware: str) -> list[str]:
    """Add JUnit files to the project's history and write it; what was added and which estimates are off."""
    project = read_project(root.resolve())
    catalogue = project.catalogue
    if hardware != CPU and hardware not in catalogue.hardware:
        raise LanesError(f"unknown hardware {hardware}; known: {', '.join([CPU, *catalogue.hardware])}")
    path = project.root / catalogue.history
    history = load_history(path)
    num_tests = 0
    for file in junit:
        minutes = read_junit(file)
        num_tests += len(minutes)
        history = history.record(hardware, minutes)
    save_history(history, path)
    return [f"{path}: {num_tests} times of {len(junit)} files on {hardware}", *drifts(project.cases, history)]


def coverage_text(root: Path, evidence: Sequence[Path] | None) -> str:
    """The coverage block of the README."""
    return coverage_block(read_project(root.resolve()), load_runs(root, evidence))
