"""Reads at run time: which variables this process has looked up, and who did.

A scan of source says what could be read; this says what was. Only lookups in Python are seen: a library that calls
``getenv`` itself (NCCL, the CUDA driver) is not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SKIPPED = ("os", "_collections_abc", "collections.abc", __name__)
"""Modules between a lookup and who asked."""


class Reads:
    """Names that were looked up, with the top-level packages that did (at most a few of each)."""

    def __init__(self) -> None:
        self.by_name: dict[str, set[str]] = {}

    def note(self, name: object) -> None:
        """Called for every lookup."""
        if isinstance(name, str):
            self.by_name.setdefault(name, set()).add(_caller())

    def names(self) -> list[str]:
        """All names, in order."""
        return sorted(self.by_name)

    def as_dict(self) -> dict[str, list[str]]:
        """Name → packages that read it."""
        return {name: sorted(packages) for name, packages in sorted(self.by_name.items())}


def _caller() -> str:
    frame = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") in _SKIPPED:
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "") if frame is not None else ""
    return str(module).partition(".")[0]


_recording: list[Reads] = []


_copies: list[tuple[int, int]] = []
"""Where a copy of the whole is being made: the frame and its instruction that asked for all keys, the last one only."""


class _Recording(os._Environ):  # pyright: ignore[reportMissingTypeArgument]
    """``os.environ`` while somebody records. A copy of the whole (``dict(os.environ)``) is no lookup: it asks for the
    keys and then for each value, from one instruction."""

    def __getitem__(self, key: Any) -> Any:
        frame = sys._getframe(1)
        if (id(frame), frame.f_lasti) not in _copies:
            _note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        _note(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        frame = sys._getframe(1)
        _copies[:] = [(id(frame), frame.f_lasti)]
        return super().keys()

    def items(self) -> Any:
        return dict(self).items()

    def values(self) -> Any:
        return dict(self).values()


def _note(key: object) -> None:
    for reads in _recording:
        reads.note(key)


@contextmanager
def recorded_reads() -> Iterator[Reads]:
    """Record every lookup in ``os.environ`` and by ``os.getenv`` until the end of the block."""
    reads = Reads()
    environment: Any = os.environ
    original = type(environment)
    _recording.append(reads)
    if original is not _Recording:
        environment.__class__ = _Recording
    try:
        yield reads
    finally:
        _recording.remove(reads)
        if not _recording:
            environment.__class__ = os._Environ
