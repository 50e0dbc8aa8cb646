"""How far a stage is, on a terminal: bytes, rate and time left. Quiet where stderr is none."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars


class TerminalProgress:
    """``writer.Progress`` on stderr: one bar for each thing that begins."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        shown = sys.stderr.isatty()
        self._bars = Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown)
        self._current = None

    def begin(self, what: str, total_bytes: int) -> None:
        """Another bar; none for nothing."""
        self._current = self._bars.add_task(what, total=total_bytes) if total_bytes else None

    def advance(self, num_bytes: int) -> None:
        """Move the current bar. Called from any thread."""
        if self._current is not None:
            self._bars.advance(self._current, num_bytes)

    def __enter__(self) -> TerminalProgress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()


class Silent:
    """``writer.Progress`` that tells nobody."""

    def begin(self, what: str, total_bytes: int) -> None:
        """Nothing."""

    def advance(self, num_bytes: int) -> None:
        """Nothing."""
