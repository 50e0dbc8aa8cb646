"""A sample of a checkpoint's values, read straight from the files: is anything not finite, or a scale not positive?

Bits are looked at, not numbers, so that every dtype of safetensors is judged without a library that knows it. What is
read has a bound; a tensor is read in pieces spread over its length.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.errors import Problem, shown
from lockstep.checkpoint.records import TensorEntry
from lockstep.checkpoint.strict_json import open_regular

PIECE_BYTES = 4096
LEAST_PIECES = 3
SAMPLE_BYTES = 64 << 20
_COMPARED_BYTES = 4 << 20

_EXPONENTS: dict[str, tuple[Any, int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F8_E5M2": (np.uint8, 0x7C),
}
"""Unsigned type of the same size, and the exponent bits, all of which are set in infinities and NaN."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A tensor to be sampled. ``scale``: block scales, which must be positive. ``below``: integers must be in
    [0, below)."""

    entry: TensorEntry
    scale: bool = False
    below: int | None = None


def sample_values(folder: Path, tensors: Sequence[Judged], budget: int, problems: list[Problem]) -> int:
    """Read about ``budget`` bytes spread over the tensors, note what is not finite or not positive. Returns the bytes
    read. Too many tensors for the budget: every n-th of them, at least ``LEAST_PIECES`` pieces of each."""
    step = max(1, -(-len(tensors) * LEAST_PIECES * PIECE_BYTES // max(1, budget)))
    chosen = tensors[::step]
    pieces = max(LEAST_PIECES, budget // (PIECE_BYTES * max(1, len(chosen))))
    by_file: dict[str, list[Judged]] = {}
    for judged in chosen:
        by_file.setdefault(judged.entry.file, []).append(judged)
    read = 0
    for file, own in by_file.items():
        try:
            descriptor = open_regular((folder / file).resolve())
        except OSError as error:
            problems.append(Problem("values can't be read", f"{shown(file)}: {error}"))
            continue
        try:
            for judged in own:
                read += _sample(descriptor, judged, pieces, problems)
        finally:
            os.close(descriptor)
    return read


def equal_bytes(folder: Path, one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors have the same bytes, all of them, read in pieces. Raises OSError."""
    size = one.end - one.begin
    if size != other.end - other.begin:
        return False
    descriptors = [open_regular((folder / entry.file).resolve()) for entry in (one, other)]
    try:
        for offset in range(0, size, _COMPARED_BYTES):
            length = min(_COMPARED_BYTES, size - offset)
            pieces = [
                os.pread(descriptor, length, entry.begin + offset)
                for descriptor, entry in zip(descriptors, (one, other), strict=True)
            ]
            if pieces[0] != pieces[1]:
                return False
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return True


def _sample(descriptor: int, judged: Judged, pieces: int, problems: list[Problem]) -> int:
    read = 0
    for begin, length in _pieces(judged.entry, pieces):
        data = os.pread(descriptor, length, begin)
        read += len(data)
        where = f"{shown(judged.entry.name)} ({shown(judged.entry.file)}, from byte {begin})"
        if len(data) != length:
            problems.append(Problem("values can't be read", f"{where}: the file ends before it"))
            return read
        wrong = fault(judged, data)
        if wrong:
            problems.append(Problem("values are wrong", f"{where}: {wrong}"))
            return read
    return read


def _pieces(entry: TensorEntry, count: int) -> Iterator[tuple[int, int]]:
    """So many pieces from the first byte to the last, or the whole where it isn't longer; whole elements."""
    size = entry.end - entry.begin
    if size <= count * PIECE_BYTES:
        if size:
            yield entry.begin, size
        return
    last = (size - PIECE_BYTES) // 16 * 16
    for number in range(count):
        offset = last * number // (count - 1) // 16 * 16
        yield entry.begin + offset, PIECE_BYTES if number < count - 1 else size - offset


def fault(judged: Judged, data: bytes) -> str:
    """What is wrong with these bytes of a tensor; empty if nothing is."""
    dtype = judged.entry.dtype
    if judged.below is not None and dtype in ("I64", "I32"):
        numbers = np.frombuffer(data, np.int64 if dtype == "I64" else np.int32)
        wrong = (numbers < 0) | (numbers >= judged.below)
        return _report(wrong, f"outside [0, {judged.below})")
    broken = _not_finite(dtype, data)
    if broken is None:
        return ""
    text = _report(broken, "not finite")
    if not text and judged.scale and dtype == "F32":
        text = _report(np.frombuffer(data, np.float32) <= 0, "not positive, as block scales must be")
    return text


def _not_finite(dtype: str, data: bytes) -> npt.NDArray[np.bool_] | None:
    """Per element, whether it is NaN or infinite; None for a dtype that can't be (integers, e2m1)."""
    if dtype in _EXPONENTS:
        unsigned, exponent = _EXPONENTS[dtype]
        return (np.frombuffer(data, unsigned) & unsigned(exponent)) == unsigned(exponent)
    codes = np.frombuffer(data, np.uint8)
    match dtype:
        case "F8_E4M3":
            return (codes & 0x7F) == 0x7F
        case "F8_E4M3FNUZ" | "F8_E5M2FNUZ":
            return codes == 0x80
        case "F8_E8M0":
            return codes == 0xFF
    return None


def _report(wrong: npt.NDArray[np.bool_], what: str) -> str:
    count = int(wrong.sum())
    return f"{count} of {wrong.size} sampled values are {what}" if count else ""


def judged_tensors(tensors: Mapping[str, TensorEntry], scales: frozenset[str], ids: Mapping[str, int]) -> list[Judged]:
    """All tensors in order of their names; ``ids`` has the bound of integer tables."""
    return [Judged(tensors[name], name in scales, ids.get(name)) for name in sorted(tensors)]
