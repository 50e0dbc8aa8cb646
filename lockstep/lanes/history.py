"""Measured minutes of each test on each hardware, smoothed over runs, kept as one JSON file that machines share.

They come from JUnit XML, which every CI keeps. Parameters of a test are summed; failed, skipped and erring tests give
no time, because they stopped early.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.lanes.declare import Case
from lockstep.lanes.errors import LanesError
from lockstep.lanes.files import write_text

ALPHA = 0.3
"""Weight of the newest run in the exponential smoothing."""

DRIFT = 2.0
"""An estimate off by more than this factor, either way, is reported."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Smoothed minutes of a test on one hardware, and over how many runs."""

    minutes: float
    num_runs: int


@dataclass(frozen=True, slots=True)
class History:
    """``times[hardware][key]``; see ``junit_key``."""

    times: Mapping[str, Mapping[str, Measured]]

    def minutes(self, case: Case) -> float:
        """Measured minutes of a case, else its estimate."""
        measured = self.measured(case)
        return case.minutes if measured is None else measured.minutes

    def measured(self, case: Case) -> Measured | None:
        """What was measured of a case, None if nothing was."""
        return self.times.get(case.hardware, {}).get(junit_key(case.test_id))

    def record(self, hardware: str, minutes: Mapping[str, float]) -> History:
        """The history with one more run of these tests."""
        known = dict(self.times.get(hardware, {}))
        for key, value in minutes.items():
            old = known.get(key)
            smoothed = value if old is None else ALPHA * value + (1 - ALPHA) * old.minutes
            known[key] = Measured(smoothed, 1 if old is None else old.num_runs + 1)
        return replace(self, times={**self.times, hardware: known})


def junit_key(test_id: str) -> str:
    """``tests.test_x.TestB::test_a``: what pytest's JUnit XML says of ``tests/test_x.py::TestB::test_a``."""
    path, *names = test_id.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *names[:-1]]) + f"::{names[-1]}"


def read_junit(path: Path) -> dict[str, float]:
    """Minutes by key of the tests that passed in one JUnit file, parameters summed. Raises ``LanesError``."""
    try:
        text = path.read_text(encoding="utf-8")
        if "<!DOCTYPE" in text or "<!ENTITY" in text:  # entities can grow without bound; JUnit files have none
            raise LanesError(f"{path} declares a document type; JUnit files have none, so it is not read")
        suites = ElementTree.fromstring(text)
    except (OSError, UnicodeDecodeError, ElementTree.ParseError) as error:
        raise LanesError(f"{path} is not JUnit XML: {error}; write it with pytest --junitxml") from None
    minutes: dict[str, float] = {}
    spoiled: set[str] = set()
    for test in suites.iter("testcase"):
        key = f"{test.get('classname', '')}::{(test.get('name') or '').partition('[')[0]}"
        if any(child.tag in ("failure", "error", "skipped") for child in test):
            spoiled.add(key)
            continue
        minutes[key] = minutes.get(key, 0.0) + _seconds(test.get("time") or "0", key, path) / 60
    return {key: value for key, value in minutes.items() if key not in spoiled}


def _seconds(text: str, key: str, path: Path) -> float:
    """A time that can be one: a clock that was set back gives negative ones, which would spoil every later plan."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise LanesError(f"{path}: {key} has time {text}; expected seconds from 0; leave this file out")
    return seconds


def load_history(path: Path) -> History:
    """The history kept in a file; empty if there is none. Raises ``LanesError`` if it is damaged."""
    if not path.exists():
        return History({})
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        times = {
            hardware: {key: Measured(float(one["minutes"]), int(one["num_runs"])) for key, one in tests.items()}
            for hardware, tests in table["times"].items()
        }
        wrong = [key for tests in times.values() for key, one in tests.items() if not 0 <= one.minutes < math.inf]
        if wrong:
            raise ValueError(f"minutes of {wrong[0]}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LanesError(f"{path} is not a history of lanes ({error!r}); delete it to begin anew") from None
    return History(times)


def save_history(history: History, path: Path) -> None:
    """Write a history, sorted, so that its changes can be reviewed."""
    times = {
        hardware: {
            key: {"minutes": round(tests[key].minutes, 4), "num_runs": tests[key].num_runs} for key in sorted(tests)
        }
        for hardware, tests in sorted(history.times.items())
    }
    write_text(path, json.dumps({"times": times}, indent=1) + "\n")


def drifts(cases: Iterable[Case], history: History) -> list[str]:
    """Estimates that are off by more than ``DRIFT``, each with the value to write.

    A test without a mark shares one small estimate, so only one that takes over a minute longer is named.
    """
    found: dict[str, tuple[Case, list[tuple[str, Measured]]]] = {}
    for case in cases:
        measured = history.measured(case)
        if measured is not None:
            found.setdefault(case.test_id, (case, []))[1].append((case.hardware, measured))
    lines: list[str] = []
    for case, seen in found.values():
        hardware, worst = max(seen, key=lambda one: one[1].minutes)
        # What takes no time that can be measured is as short as an estimate can say, and no infinitely wrong one.
        ratio = max(worst.minutes, min(case.minutes, 0.01)) / case.minutes
        value = f"{max(worst.minutes, 0.01):.2g}"
        told = f"measured {value} min on {hardware} over {worst.num_runs} run{'s' if worst.num_runs != 1 else ''}"
        if not case.declared:
            if worst.minutes > case.minutes + 1.0:
                lines.append(f"{case.where}: {case.test_id} has no estimate and {told}: mark it with minutes={value}")
        elif max(ratio, 1 / ratio) > DRIFT:
            lines.append(f"{case.where}: minutes={case.minutes:g}, {told}: write minutes={value}")
    return lines
