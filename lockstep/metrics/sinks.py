"""Where rows go: ``JsonlSink`` appends one JSON object per line and has it on the disk before it returns.

The file is the run's memory, so it is never left half-written and never loses a row:

- a crash in the middle of an append leaves an unfinished last line, which the next open cuts off and says;
- an append that fails (a full disk) is undone before the error is raised;
- a resume from an earlier step moves the rows after it to a side file (``rewind``).

One writer at a time; the run folder's lock sees to that. Anyone may read at any moment with ``read_jsonl``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from lockstep.durable import fsync_path, replace_text
from lockstep.metrics.metric import decode_nonfinite, encode_nonfinite

logger = logging.getLogger(__name__)

Row = dict[str, object]


def dump_row(row: Mapping[str, object]) -> str:
    """One line of JSON without the newline; non-finite floats as text (see ``metric``)."""
    return json.dumps(encode_nonfinite(row), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def read_jsonl(path: Path) -> list[Row]:
    """All whole rows of a file, which may be growing: an unfinished last line is left out.

    Raises ValueError with the line number when any other line is not a JSON object.
    """
    return _split_rows(path, path.read_bytes())[0]


def _split_rows(path: Path, content: bytes) -> tuple[list[Row], int]:
    """Whole rows, and the number of bytes they take. What follows is an unfinished last line."""
    rows: list[Row] = []
    good_bytes = 0
    lines = content.split(b"\n")  # a newline inside a text is escaped, so this is the only separator
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is None and number < len(lines):
            raise ValueError(f"{path}, line {number}: not a JSON object: {line[:80]!r}")
        if row is None:
            break
        rows.append(row)
        good_bytes = min(good_bytes + len(line) + 1, len(content))
    return rows, good_bytes


def _parse(line: bytes) -> Row | None:
    try:
        value = json.loads(line.decode("utf-8"))
    except ValueError:  # not UTF-8 or not JSON: the line was cut, or a crash left a block of zeros
        return None
    return {key: decode_nonfinite(inner) for key, inner in value.items()} if isinstance(value, dict) else None


class JsonlSink:
    """An append-only file of JSON objects.

    ``order_key``: name of a whole number that must rise from row to row (``"step"`` for metrics); None: any order.
    ``num_cut_bytes``: length of the unfinished last line that opening the file cut off, 0 if there was none.
    """

    def __init__(self, path: Path, order_key: str | None = None) -> None:
        self.path = Path(path)
        self.order_key = order_key
        self.num_cut_bytes = 0
        is_new = not self.path.exists()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if is_new:
            fsync_path(self.path.parent)
        try:
            self._last = self._repair()
        except BaseException:
            self.close()
            raise

    def append(self, row: Mapping[str, object]) -> None:
        """Append a row; it is on the disk when this returns. Raises ValueError for a row out of order, and OSError if
        the disk refuses, after the file was put back as it was."""
        order = self._order_of(row)
        if order is not None and self._last is not None and order <= self._last:
            raise ValueError(
                f"{self.path}: {self.order_key} {order} after {self.order_key} {self._last}; rows only go forward "
                "(rewind first to go back)"
            )
        content = (dump_row(row) + "\n").encode("utf-8")
        before = os.fstat(self._descriptor).st_size
        try:
            written = 0
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, before)
            raise OSError(error.errno, f"could not append a row ({error.strerror})", str(self.path)) from error
        self._last = order

    def rows(self) -> list[Row]:
        """All rows, as they are on the disk."""
        return read_jsonl(self.path)

    def rewind(self, keep: Callable[[Row], bool], side_file: Path) -> int:
        """Move the rows for which ``keep`` is false to ``side_file`` and return how many. The side file is on the disk
        before the rows leave this one, so that no crash loses a row."""
        rows = self.rows()
        dropped = [row for row in rows if not keep(row)]
        if not dropped:
            return 0
        replace_text(side_file, "".join(dump_row(row) + "\n" for row in dropped))
        kept = [row for row in rows if keep(row)]
        replace_text(self.path, "".join(dump_row(row) + "\n" for row in kept))
        os.close(self._descriptor)  # the descriptor still points at the replaced file
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._last = self._order_of(kept[-1]) if kept else None
        logger.warning("%s: moved %d rows to %s", self.path, len(dropped), side_file)
        return len(dropped)

    def close(self) -> None:
        """Close the file. Nothing is buffered, so nothing can be lost here."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _repair(self) -> int | None:
        """Cut an unfinished last line, end a whole one that lacks its newline; the order of the last row."""
        content = self.path.read_bytes()
        rows, good_bytes = _split_rows(self.path, content)
        self.num_cut_bytes = len(content) - good_bytes
        if self.num_cut_bytes:
            logger.warning(
                "%s: cut an unfinished last line of %d bytes (a crash during a write)", self.path, self.num_cut_bytes
            )
            os.ftruncate(self._descriptor, good_bytes)
        elif content and not content.endswith(b"\n"):
            os.write(self._descriptor, b"\n")
        os.fsync(self._descriptor)
        return self._order_of(rows[-1]) if rows else None

    def _order_of(self, row: Mapping[str, object]) -> int | None:
        if self.order_key is None:
            return None
        value = row.get(self.order_key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{self.path}: a row needs a whole number {self.order_key!r}, got {value!r}")
        return value
