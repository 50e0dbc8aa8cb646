"""Timing as Chrome/Perfetto events: ``with span("rollout"): …``.

A span is recorded when it closes, in the recorder installed by ``recording``; with none installed it costs two clock
reads. Phases are compared by their names, so a name says what is done, not where. Spans of one name add up: one must
never lie inside another of its name, or its time counts twice.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Recorder:
    """Collects spans: ``totals_s`` since the last ``take_totals`` for the step metrics, events for ``trace.json``."""

    max_events: int = 200_000
    events: list[dict[str, object]] = field(default_factory=list)
    totals_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_dropped: int = 0

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        self.totals_s[name] += (end_ns - start_ns) / 1e9
        if len(self.events) >= self.max_events:
            self.num_dropped += 1
            return
        self.events.append(
            {
                "name": name,
                "ph": "X",
                "ts": start_ns / 1e3,
                "dur": (end_ns - start_ns) / 1e3,
                "pid": os.getpid(),
                "tid": threading.get_native_id(),
            }
        )

    def take_totals(self) -> dict[str, float]:
        """Seconds by span name since the last call."""
        totals, self.totals_s = dict(self.totals_s), defaultdict(float)
        return totals

    def write(self, path: Path) -> None:
        """Write a trace for chrome://tracing and ui.perfetto.dev. Replaced whole, so it is valid at any moment."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"traceEvents": self.events, "droppedEvents": self.num_dropped}))
        temporary.replace(path)


_recorder: Recorder | None = None


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Install ``recorder`` for the process while the block runs."""
    global _recorder
    previous, _recorder = _recorder, recorder
    try:
        yield recorder
    finally:
        _recorder = previous


@contextmanager
def span(name: str) -> Iterator[None]:
    """Time a block under ``name``. Recorded also when the block raises."""
    start_ns = time.perf_counter_ns()
    try:
        yield
    finally:
        if _recorder is not None:
            _recorder.add(name, start_ns, time.perf_counter_ns())
