"""Where a run stands, beside the trainer's own state: what a resume needs to continue as if nothing had happened."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = "progress.json"
FORMAT = 1


@dataclass
class Progress:
    """``step``: last finished step; ``version``: the policy's after it; ``cursor``: next training problem; ``gate``:
    the gate's state; ``inputs``: what the run reads from outside, by content (``inputs.fingerprints``)."""

    step: int = 0
    version: int = 0
    cursor: int = 0
    gate: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)

    def advance(self, step: int, version: int, cursor: int, gate: dict[str, Any]) -> None:
        """The step is finished."""
        self.step, self.version, self.cursor, self.gate = step, version, cursor, gate

    def save(self, folder: Path) -> None:
        """Write ``progress.json`` into a checkpoint folder."""
        (folder / FILE).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2))

    @classmethod
    def load(cls, folder: Path) -> Progress:
        """Read it back. Raises ValueError for another format."""
        data = json.loads((folder / FILE).read_text())
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"{folder / FILE}: unknown format; this version reads format {FORMAT}")
        return cls(**data)
