"""What a run folder holds, read with patience: a piece that is missing becomes a note, not an error."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.metrics.run_folder import AGREEMENT, CONFIG, ENVIRONMENT, METRICS, REFITS, RunFolderError, rollout_steps
from lockstep.metrics.sinks import Row, read_jsonl


@dataclass(frozen=True, slots=True)
class RunData:
    """One run as the report sees it. ``notes``: what is missing or remarkable, as sentences for the reader.

    ``rows`` are the metric rows that have a step, in order; ``steps`` are their steps. ``agreement`` are the lines of
    ``agreement.jsonl``: buckets and worst tokens by step.
    """

    path: Path
    config: dict[str, object]
    environment: dict[str, object]
    rows: list[Row]
    refits: list[Row]
    rollout_steps: list[int]
    notes: list[str] = field(default_factory=list)
    agreement: list[Row] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return [int(row["step"]) for row in self.rows if isinstance(row["step"], int)]

    def column(self, name: str) -> list[float | None]:
        """Values of one metric over ``steps``; None where it is absent or no number. Non-finite values are kept."""
        return [number(row.get(name)) for row in self.rows]

    def setting(self, dotted: str) -> object:
        """A value of the resolved configuration by its dotted name, or None."""
        value: object = self.config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def number(value: object) -> float | None:
    """The value if it is a number (not a bool), else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def collect(path: Path) -> RunData:
    """Read a run folder. Raises FileNotFoundError if it is not there, RunFolderError if it is something else,
    ValueError if a file can't be understood."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder; give the run folder of a run")
    if not any((path / name).is_file() for name in (CONFIG, METRICS)):
        raise RunFolderError(
            f"{path} is no run folder: it has neither {CONFIG} nor {METRICS}; give the folder of a run"
        )
    notes: list[str] = []
    config = _read_config(path / CONFIG, notes)
    environment = _read_environment(path / ENVIRONMENT, notes)
    rows = [row for row in _read_rows(path / METRICS, "metrics", notes) if isinstance(row.get("step"), int)]
    refits = _read_rows(path / REFITS, "refit receipts", notes)
    steps = rollout_steps(path)
    if not steps:
        notes.append("No rollouts were recorded, so there are no samples to look at.")
    places = read_jsonl(path / AGREEMENT) if (path / AGREEMENT).exists() else []
    places = [row for row in places if isinstance(row.get("step"), int)]
    run = RunData(path, config, environment, rows, refits, steps, notes, places)
    _note_early_end(run)
    return run


def _note_early_end(run: RunData) -> None:
    planned = number(run.setting("steps"))
    if planned is not None and run.steps and run.steps[-1] < planned:
        run.notes.append(
            f"This run is not finished: {run.steps[-1]} of {planned:g} steps are recorded. It stopped early or is "
            "still going on."
        )


def _read_config(path: Path, notes: list[str]) -> dict[str, object]:
    if not path.exists():
        notes.append(f"{CONFIG} is missing: the recipe, the planned steps and the bound's reason are not known.")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} can't be read as TOML: {error}") from error


def _read_environment(path: Path, notes: list[str]) -> dict[str, object]:
    if not path.exists():
        notes.append(f"{ENVIRONMENT} is missing: versions and hardware are not known.")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _read_rows(path: Path, what: str, notes: list[str]) -> list[Row]:
    rows = read_jsonl(path) if path.exists() else []
    if not rows:
        notes.append(f"{path.name} is {'empty' if path.exists() else 'missing'}: there are no {what} to show.")
    return rows
