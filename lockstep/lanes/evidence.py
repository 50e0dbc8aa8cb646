"""What remains of a run on a lane: what ran, where, with which versions, how long, every gate's value, left-overs.

One JSON file for each run, in the catalogue's ``evidence`` folder. Nothing in it names the machine's host or a user.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from lockstep.lanes.errors import LanesError
from lockstep.lanes.files import write_text

SCHEMA = 1
Outcome = Literal["passed", "failed", "skipped"]
Sense = Literal["at_most", "at_least", "held"]


@dataclass(frozen=True, slots=True)
class Gate:
    """A value against its bound. ``sense``: ``at_most``, ``at_least``, or ``held`` for a claim (value 1 or 0).

    ``outliers``: values of a series beyond its alarm, which are reported and do not fail the gate.
    """

    name: str
    value: float
    bound: float
    sense: Sense
    outliers: tuple[float, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the value keeps the bound; one that is not finite never does."""
        if not math.isfinite(self.value):
            return False
        return self.value <= self.bound if self.sense == "at_most" else self.value >= self.bound

    def text(self) -> str:
        """``agreement 0.004 ≤ 0.07``."""
        if self.sense == "held":
            return f"{self.name} {'held' if self.passed else 'not held'}"
        sign = {("at_most", True): "≤", ("at_most", False): "> bound", ("at_least", True): "≥"}.get(
            (self.sense, self.passed), "< bound"
        )
        tail = f" ({len(self.outliers)} outliers)" if self.outliers else ""
        return f"{self.name} {self.value:.4g} {sign} {self.bound:.4g}{tail}"


@dataclass(frozen=True, slots=True)
class Result:
    """One test of a run, its parameters together. ``num_attempts`` above ``num_items``: retries were made.

    ``left``: processes, variables and GPU memory that it left behind, in words. ``why``: of a failure or skip.
    """

    test_id: str
    outcome: Outcome
    minutes: float
    num_items: int = 1
    num_retries: int = 0
    timeout_s: float | None = None
    recipe: str | None = None
    overlay: str | None = None
    gates: tuple[Gate, ...] = ()
    left: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One session of pytest on a lane. ``devices``: names as the driver prints them. ``exit_status``: pytest's."""

    lane: str
    stage: str
    hardware: str
    vendor: str
    devices: tuple[str, ...]
    source: str
    shard: str
    commit: str
    started: str
    minutes: float
    exit_status: int
    command: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)
    tests: tuple[Result, ...] = ()


def write_run(run: Run, folder: Path) -> Path:
    """Write a run into the folder, under a name of its own."""
    started = datetime.fromisoformat(run.started).astimezone(UTC).strftime("%Y%m%dT%H%M%S")
    stem = f"{started}-{run.lane}-{run.hardware}-{run.shard.replace('/', 'of')}"
    number = 0
    while (path := folder / f"{stem}{f'-{number}' if number else ''}.json").exists():
        number += 1
    write_text(path, json.dumps({"schema": SCHEMA, **asdict(run)}, indent=1, allow_nan=True) + "\n")
    return path


def read_run(path: Path) -> Run:
    """A run that ``write_run`` wrote. Raises ``LanesError``."""
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if table.pop("schema") != SCHEMA:
            raise LanesError(f"{path} was written by another version of lanes")
        tests = tuple(_result(one) for one in table.pop("tests"))
        lists = {name: tuple(table.pop(name)) for name in ("devices", "command")}
        run = Run(tests=tests, **lists, **table)
        if datetime.fromisoformat(run.started).tzinfo is None or type(run.exit_status) is not int:
            raise ValueError(f"started {run.started!r}, exit_status {run.exit_status!r}")
        return run
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LanesError(f"{path} is not the evidence of a run: {error!r}") from None


def _result(table: dict[str, Any]) -> Result:
    gates = tuple(Gate(**(gate | {"outliers": tuple(gate["outliers"])})) for gate in table.pop("gates"))
    result = Result(**(table | {"gates": gates, "left": tuple(table["left"])}))
    if result.outcome not in get_args(Outcome):
        raise ValueError(f"outcome {result.outcome!r} of {result.test_id}")
    if any(gate.sense not in get_args(Sense) for gate in gates) or not 0 <= result.minutes < math.inf:
        raise ValueError(f"gates or minutes of {result.test_id}")
    return result


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """All runs in these folders, the oldest first. A folder that is not there has none.

    Raises ``LanesError`` with every file that is no evidence: one that was cut off may be the newest run of its test.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for path in (path for folder in folders for path in sorted(folder.rglob("*.json"))):
        try:
            runs.append(read_run(path))
        except LanesError as error:
            problems += error.problems
    if problems:
        raise LanesError(problems)
    return sorted(runs, key=lambda run: datetime.fromisoformat(run.started))
