"""Where a run stands, beside the trainer's own state: what a resume needs to continue as if nothing had happened."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.driver.idle import Idle, IdleCount

FILE = "progress.json"
FORMAT = 1


@dataclass
class Progress:
    """``step``: last finished step; ``version``: the policy's after it; ``cursor``: next training problem; ``gate``:
    the gate's state; ``inputs``: what the run reads from outside, by content (``inputs.fingerprints``); ``idle``: how
    many steps moved no weight."""

    step: int = 0
    version: int = 0
    cursor: int = 0
    gate: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    idle: IdleCount = field(default_factory=IdleCount)

    def advance(self, step: int, version: int, cursor: int, gate: dict[str, Any], idle: Idle | None = None) -> None:
        """The step is finished; ``idle`` if it moved no weight."""
        self.step, self.version, self.cursor, self.gate = step, version, cursor, gate
        self.idle.add(idle)

    def save(self, folder: Path) -> None:
        """Write ``progress.json`` into a checkpoint folder."""
        (folder / FILE).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2))

    @classmethod
    def load(cls, folder: Path) -> Progress:
        """Read it back. Raises ValueError for another format."""
        data = json.loads((folder / FILE).read_text())
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"{folder / FILE}: unknown format; this version reads format {FORMAT}")
        idle = IdleCount(**data.pop("idle", {}))
        return cls(**data, idle=idle)
