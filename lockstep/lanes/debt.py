"""What lanes owe: tests that are off, flaky, mis-estimated, never run or orphaned; each with its place."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

from lockstep.lanes.catalogue import FILE
from lockstep.lanes.changes import ImportGraph, git
from lockstep.lanes.errors import LanesError
from lockstep.lanes.evidence import Run
from lockstep.lanes.history import History, drifts, junit_key
from lockstep.lanes.plan import Project
from lockstep.lanes.read import is_test_file, python_files
from lockstep.lanes.status import last_results, status

Kind = Literal["disabled", "flaky", "mis-estimated", "never run", "orphaned", "gates", "left behind"]
KINDS: tuple[Kind, ...] = ("disabled", "flaky", "mis-estimated", "never run", "orphaned", "gates", "left behind")


@dataclass(frozen=True, slots=True)
class Debt:
    """One item: its kind and what to know about it."""

    kind: Kind
    text: str


def debt(project: Project, runs: Sequence[Run], recipes: Sequence[str], today: date) -> list[Debt]:
    """All debts, by kind in the order of ``KINDS``."""
    rows = status(project, runs, recipes, today)
    found = [
        Debt(
            "disabled" if row.state in ("disabled", "expired") else "never run",
            f"{row.test_id} [{row.hardware}]: {row.detail}",
        )
        for row in rows
        if row.state in ("disabled", "expired", "never ran")
    ]
    found += [Debt("flaky", text) for text in flaky(runs)]
    found += [Debt("mis-estimated", text) for text in drifts(project.cases, known_times(project, runs))]
    found += [Debt("orphaned", text) for text in orphans(project, recipes)]
    found += [Debt("gates", text) for text in [*one_sided_gates(runs), *outliers(runs)]]
    found += [Debt("left behind", text) for text in left_behind(runs)]
    return sorted(found, key=lambda one: KINDS.index(one.kind))


def known_times(project: Project, runs: Iterable[Run]) -> History:
    """The project's history, and for tests that it does not know on a hardware the minutes of their evidence."""
    seen = History({})
    for run in runs:
        passed = {junit_key(one.test_id): one.minutes for one in run.tests if one.outcome == "passed"}
        seen = seen.record(run.hardware, passed)
    times = {hardware: dict(tests) for hardware, tests in seen.times.items()}
    for hardware, tests in project.history.times.items():
        times.setdefault(hardware, {}).update(tests)
    return History(times)


def flaky(runs: Iterable[Run]) -> list[str]:
    """Tests that were retried, or gave two outcomes at one commit on one hardware."""
    retried: dict[tuple[str, str], int] = {}
    outcomes: dict[tuple[str, str, str], set[str]] = {}
    for run in runs:
        for result in run.tests:
            key = (result.test_id, run.hardware)
            retried[key] = retried.get(key, 0) + result.num_retries
            if result.outcome != "skipped" and not run.commit.endswith("+changes"):
                outcomes.setdefault((*key, run.commit), set()).add(result.outcome)
    lines = [f"{test} [{hardware}]: retried {count} times" for (test, hardware), count in retried.items() if count]
    lines += [
        f"{test} [{hardware}]: passed and failed at {commit[:10]}"
        for (test, hardware, commit), seen in outcomes.items()
        if len(seen) > 1
    ]
    return lines


def one_sided_gates(runs: Iterable[Run]) -> list[str]:
    """Gates that a test recorded on one vendor in its last run and not on another."""
    by_test: dict[str, dict[str, set[str]]] = {}
    for (test_id, _), (run, result) in last_results(runs).items():
        if result.outcome == "passed":
            by_test.setdefault(test_id, {}).setdefault(run.vendor, set()).update(g.name for g in result.gates)
    lines: list[str] = []
    for test_id, vendors in by_test.items():
        every: set[str] = set().union(*vendors.values())
        lines += [
            f"{test_id}: {', '.join(sorted(every - names))} recorded elsewhere and not on {vendor}"
            for vendor, names in sorted(vendors.items())
            if every - names
        ]
    return lines


def outliers(runs: Iterable[Run]) -> list[str]:
    """Alarms of series whose gate passed."""
    return [
        f"{test_id} [{hardware}]: {gate.name} has {len(gate.outliers)} outliers to {max(gate.outliers, key=abs):.4g}"
        for (test_id, hardware), (_, result) in last_results(runs).items()
        for gate in result.gates
        if gate.outliers
    ]


def left_behind(runs: Iterable[Run]) -> list[str]:
    """What the last run of each test left."""
    return [
        f"{test_id} [{hardware}]: {text}"
        for (test_id, hardware), (_, result) in last_results(runs).items()
        for text in result.left
    ]


def orphans(project: Project, recipes: Sequence[str]) -> list[str]:
    """Labels, lanes, runners, recipes without a test; test files that no lane collects; modules no test imports."""
    catalogue = project.catalogue
    carried = {label for case in project.cases for label in case.labels}
    lines = [
        f"{FILE}: label {name} has no test"
        for name, label in catalogue.labels.items()
        if label.picks_tests and name not in carried
    ]
    used = {case.lane for case in project.cases}
    lines += [f"{FILE}: lane {name} has no test" for name in catalogue.lanes if name not in used]
    models = {case.hardware for case in project.cases}
    lines += [
        f"{FILE}: runner {name} has no test for {one.hardware}"
        for name, one in catalogue.runners.items()
        if one.hardware not in models
    ]
    tested = {case.recipe for case in project.cases}
    lines += [f"recipe {name} has no test that declares it" for name in recipes if name not in tested]
    lines += uncollected_files(project)
    return lines + unreached_modules(project)


def uncollected_files(project: Project) -> list[str]:
    """Files that look like tests and lie where, or are named as, no lane collects them."""
    paths = [path.rstrip("/") for path in project.catalogue.test_paths]
    everywhere = "." in paths
    lines: list[str] = []
    for name in _python_files(project.root):
        inside = everywhere or any(name == path or name.startswith(path + "/") for path in paths)
        if inside and is_test_file(Path(name).name):
            continue
        if is_test_file(Path(name).name):
            lines.append(f"{name}: a test file outside of test_paths ({', '.join(paths)}), which no lane collects")
        elif inside and _has_tests(project.root / name):
            lines.append(f"{name}: has tests, and its name is not test_*.py: no lane collects it")
    return lines


def unreached_modules(project: Project) -> list[str]:
    """Modules of the packages that no test imports, even through others: nothing notices when they break."""
    if not project.catalogue.packages:
        return []
    graph = ImportGraph.build(project.root, project.catalogue)
    below = tuple(package + "/" for package in graph.packages)
    return [
        f"{name}: no test imports it, directly or through others"
        for name in sorted(graph.importers)
        if name.startswith(below) and not graph.reached(name)
    ]


def _python_files(root: Path) -> list[str]:
    try:
        return sorted(git(root, "ls-files", "--cached", "--others", "--exclude-standard", "*.py").splitlines())
    except LanesError:
        return [path.relative_to(root).as_posix() for path in python_files(root)]


def _has_tests(path: Path) -> bool:
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError):
        return False
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(
        node.name.startswith("test") and not any("fixture" in ast.unparse(mark) for mark in node.decorator_list)
        for node in functions
    )
