"""Does pytest collect what is registered? Asked at planning, by a collection in a process of its own, without running.

A file that can't be imported on the planning machine, because its engine is not installed there, is a note for tests
that run on GPUs (the lane checks again, and there it is an error) and a problem for tests that run on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.lanes.declare import CPU, Case

VARIABLE = "LOCKSTEP_LANES_COLLECTED"
"""Where the collecting process writes what it found."""


@dataclass(frozen=True, slots=True)
class Collection:
    """``problems``: registered tests that pytest does not collect. ``notes``: what could not be looked at here."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]


def collect(root: Path, cases: Iterable[Case]) -> Collection:
    """Collect the files of the declared cases and compare."""
    declared: dict[str, list[Case]] = {}
    for case in cases:
        if case.declared:
            declared.setdefault(case.test_id, []).append(case)
    files = sorted({cases_of[0].path for cases_of in declared.values()})
    if not files:
        return Collection((), ())
    found, failed = run_collection(root, files)
    problems: list[str] = []
    notes: dict[str, str] = {}
    for test_id, own in declared.items():
        case = own[0]
        if test_id in found:
            continue
        why = failed.get(case.path)
        if why is None:
            problems.append(f"{case.where}: {test_id} is registered and pytest collected nothing of it")
        elif any(one.hardware == CPU for one in own):
            problems.append(f"{case.where}: {test_id} is registered for a CPU, and its file can't be collected: {why}")
        else:
            notes[case.path] = f"{case.path} can't be collected on this machine, its lane checks it: {why}"
    return Collection(tuple(problems), tuple(notes.values()))


def run_collection(root: Path, files: list[str]) -> tuple[set[str], dict[str, str]]:
    """Test ids that pytest finds in these files, and why a file gave none (an error, or a skip of the whole file)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "collected.json"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "lockstep.lanes.collect", *files]
        environment = {**os.environ, VARIABLE: str(out)}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        if not out.exists():
            why = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no output"]
            return set(), dict.fromkeys(files, f"pytest ended with {done.returncode}: {why[0]}")
        table = json.loads(out.read_text(encoding="utf-8"))
    return set(table["found"]), table["failed"]


class _Recorder:
    """Keeps what a collection found until it can be written."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.found: set[str] = set()
        self.failed: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember files that gave an error or skipped themselves."""
        if report.outcome != "passed":
            lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
            self.failed[report.nodeid.partition("::")[0]] = lines[-1] if lines else report.outcome

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Before -k or -m take any away."""
        self.found = {item.nodeid.partition("[")[0] for item in items}

    def pytest_collection_finish(self) -> None:
        """Write it."""
        table: Mapping[str, Any] = {"found": sorted(self.found), "failed": self.failed}
        self.out.write_text(json.dumps(table), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """In the process that collects: register the recorder."""
    out = os.environ.get(VARIABLE)
    if out:
        config.pluginmanager.register(_Recorder(Path(out)), "lockstep-lanes-recorder")
