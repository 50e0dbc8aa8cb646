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

from lockstep.lanes.catalogue import Lane
from lockstep.lanes.declare import CPU, Case

VARIABLE = "LOCKSTEP_LANES_COLLECTED"
"""Where the collecting process (``collected``) writes what it found."""


LIMIT_S = 600.0
"""How long the collection of a folder may take: a file that waits while it is imported would hold the plan for ever."""


@dataclass(frozen=True, slots=True)
class Collection:
    """``problems``: registered tests that pytest does not collect. ``notes``: what could not be looked at here."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]


def collect(root: Path, cases: Iterable[Case], lanes: Mapping[str, Lane]) -> Collection:
    """Collect the files of the declared cases, each with its lane's interpreter, and compare.

    Files of one folder are collected together, so that a ``conftest.py`` that can't be imported hides no other folder.
    """
    declared: dict[str, list[Case]] = {}
    for case in cases:
        if case.declared:
            declared.setdefault(case.test_id, []).append(case)
    groups: dict[tuple[str, str], set[str]] = {}
    for own in declared.values():
        groups.setdefault((lanes[own[0].lane].python, str(Path(own[0].path).parent)), set()).add(own[0].path)
    found: set[str] = set()
    failed: dict[str, str] = {}
    absent: dict[str, str] = {}
    for (python, _), files in groups.items():
        interpreter = root / python if "/" in python else Path(sys.executable)
        if not interpreter.exists():
            absent |= dict.fromkeys(files, f"{python} is not installed here")
            continue
        here, wrong = run_collection(root, str(interpreter), sorted(files))
        found |= here
        failed |= wrong
    return _compare(declared, found, failed, absent)


def _compare(
    declared: Mapping[str, list[Case]], found: set[str], failed: Mapping[str, str], absent: Mapping[str, str]
) -> Collection:
    problems: list[str] = []
    notes: dict[str, str] = {}
    for test_id, own in declared.items():
        case = own[0]
        why = failed.get(case.path) or absent.get(case.path)
        if test_id in found:
            continue
        if why is None:
            problems.append(f"{case.where}: {test_id} is registered and pytest collected nothing of it")
        elif case.path not in absent and any(one.hardware == CPU for one in own):
            problems.append(f"{case.where}: {test_id} is registered for a CPU, and its file can't be collected: {why}")
        else:
            notes[case.path] = f"{case.path} can't be collected on this machine, its lane checks it: {why}"
    return Collection(tuple(problems), tuple(notes.values()))


def run_collection(root: Path, python: str, files: list[str]) -> tuple[set[str], dict[str, str]]:
    """Test ids that pytest finds in these files, and why a file gave none (an error, or a skip of the whole file)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "collected.json"
        command = [python, "-m", "pytest", "--collect-only", "-q", "-p", "lockstep.lanes.collected", *files]
        environment = {**os.environ, VARIABLE: str(out)}
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return set(), dict.fromkeys(files, f"the collection did not end within {LIMIT_S:g} s")
        if not out.exists():
            why = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no output"]
            return set(), dict.fromkeys(files, f"pytest ended with {done.returncode}: {why[0]}")
        table = json.loads(out.read_text(encoding="utf-8"))
    return set(table["found"]), table["failed"]
