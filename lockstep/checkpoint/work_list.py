"""``prepare.json``: what was to be done in a target folder, from what, and the digest of each file that is done.

A file counts as done if it has the size and the SHA-256 that are written here, and the plan that it was written by is
today's plan: never because it exists. The list is replaced whole, on the disk, after each file.

    {"format": 1, "lockstep": "0.3", "stages": {"quantise": {
        "inputs": {"settings": {…}, "source": {…}},          a stage of other inputs is refused, not mixed
        "files": {"model-00001-of-00046.safetensors": {"bytes": 5368, "plan": "…", "sha256": "…", "details": {}}},
        "complete": true}}}
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.checkpoint.errors import CheckpointError, shown
from lockstep.checkpoint.strict_json import JsonError, read_object
from lockstep.durable import replace_text

WORK_LIST = "prepare.json"
FORMAT = 1
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DoneFile:
    """A file that was written whole. ``plan``: digest of what was to be written; ``details``: what its writer returned
    (JSON), for whoever needs it later."""

    bytes: int
    plan: str
    sha256: str
    details: Mapping[str, Any] = field(default_factory=dict)


class WorkList:
    """The work list of one target folder, for the one process that holds the folder's lock. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        """Read it, or begin an empty one. Raises CheckpointError for a list that can't be read: it was written whole,
        so that a broken one is somebody's edit, and starting afresh is for the user to decide."""
        self._path = folder / WORK_LIST
        self._lock = threading.Lock()
        self._stages: dict[str, Any] = {}
        if self._path.exists():
            try:
                stored = read_object(self._path, _MAX_BYTES)
                if stored.get("format") != FORMAT or not isinstance(stored.get("stages"), dict):
                    raise JsonError(f"format {shown(stored.get('format'))} instead of {FORMAT}")
            except (JsonError, OSError) as error:
                way_out = "remove it to prepare everything anew"
                raise CheckpointError(self._path, [f"can't be read: {error}; {way_out}"]) from error
            self._stages = stored["stages"]

    def begin(self, stage: str, inputs: Mapping[str, Any], *, restart: bool = False) -> None:
        """Open a stage. Raises CheckpointError, naming what differs, if it was begun with other inputs and ``restart``
        does not ask to forget that."""
        known = self._stages.get(stage)
        plain = json.loads(json.dumps(inputs))
        if known is not None and known["inputs"] != plain and not restart:
            differences = _differences(known["inputs"], plain)
            raise CheckpointError(
                self._path.parent,
                [
                    f"{stage} was begun from something else: {difference}; choose another target, or --restart to "
                    f"do {stage} anew"
                    for difference in differences
                ],
            )
        if known is None or restart:
            self._stages[stage] = {"inputs": plain, "files": {}, "complete": False}
            self._save()

    def done(self, stage: str) -> dict[str, DoneFile]:
        """The stage's finished files by name, as the list says: unverified."""
        return {name: DoneFile(**values) for name, values in self._stages.get(stage, {}).get("files", {}).items()}

    def finish_file(self, stage: str, name: str, file: DoneFile) -> None:
        """Write down that a file is whole."""
        with self._lock:
            values = {"bytes": file.bytes, "plan": file.plan, "sha256": file.sha256, "details": dict(file.details)}
            self._stages[stage]["files"][name] = values
            self._save()

    def forget_file(self, stage: str, name: str) -> None:
        """A file is no longer what the list says."""
        with self._lock:
            if self._stages[stage]["files"].pop(name, None) is not None or self._stages[stage]["complete"]:
                self._stages[stage]["complete"] = False
                self._save()

    def complete(self, stage: str) -> None:
        """Write down that all files of a stage are whole."""
        with self._lock:
            if not self._stages[stage]["complete"]:
                self._stages[stage]["complete"] = True
                self._save()

    def is_complete(self, stage: str) -> bool:
        """Whether the list says that a stage was finished; its files still have to be verified."""
        return bool(self._stages.get(stage, {}).get("complete", False))

    def _save(self) -> None:
        document = {"format": FORMAT, "lockstep": __version__, "stages": self._stages}
        replace_text(self._path, json.dumps(document, indent=1, sort_keys=True) + "\n")


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Where two JSON values differ: at most a few places, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = [
            difference
            for key in dict.fromkeys([*old, *new])
            for difference in _differences(old.get(key), new.get(key), f"{place}.{key}" if place else str(key))
        ]
        return found[:8]
    return [] if old == new else [f"{place} was {shown(old)} and is {shown(new)}"]
