"""Sums over bytes of which digests are made (of a refit's buckets and of live tensors), taken while they are copied.

``row_sums.c`` copies and sums in one pass, at the speed of the copy; numpy makes the same sums in a pass of its own
where the kernel can't be had, and a GPU's are made there. All agree to the bit, because sums modulo 2⁶⁴ have no order.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.native import NoKernel, load_kernel

GOLDEN = 0x9E3779B97F4A7C15
WORD = 2**64 - 1
ROW_WORDS = 512
ROW_BYTES = ROW_WORDS * 8

_BLOCK_ROWS = 128
"""Rows that numpy sums at once: half a megabyte, which stays in a core's cache between the two sums."""


class RowSums:
    """Sums of the rows and of the columns of a buffer's 64-bit words, modulo 2⁶⁴. ``num_bytes``: of the buffer, whole
    rows. Bytes that are never taken count as zero."""

    def __init__(self, num_bytes: int) -> None:
        self.rows = np.zeros(num_bytes // ROW_BYTES, np.uint64)
        self.columns = np.zeros(ROW_WORDS, np.uint64)

    @classmethod
    def of(cls, data: torch.Tensor) -> RowSums:
        """Of all of ``data`` (flat uint8, whole rows)."""
        sums = cls(len(data))
        if data.device.type != "cpu":
            words = data.view(torch.int64).view(-1, ROW_WORDS)
            sums.rows = words.sum(1).cpu().numpy().view(np.uint64)
            sums.columns = words.sum(0).cpu().numpy().view(np.uint64)
        elif kernel() is not None:
            sums.take(data, 0, None)
        else:
            sums._take_by_numpy(data)
        return sums

    def take(self, data: torch.Tensor, offset: int, target: torch.Tensor | None) -> None:
        """Take ``data`` (flat uint8) as what lies at byte ``offset`` (a multiple of 8), and with a ``target`` copy it
        there. Both on the CPU, each byte once. Raises ValueError for a place outside, NoKernel without the kernel."""
        num_bytes = len(data)
        if offset % 8 or offset < 0 or offset + num_bytes > len(self.rows) * ROW_BYTES:
            raise ValueError(f"{num_bytes} bytes at {offset} do not lie in {len(self.rows)} rows of words")
        if target is not None and len(target) != num_bytes:
            raise ValueError(f"{num_bytes} bytes into {len(target)}")
        library = kernel()
        if library is None:
            raise NoKernel("row_sums.c is not compiled")
        to = None if target is None else target.data_ptr()
        sums = (self.rows.ctypes.data, self.columns.ctypes.data)
        library.row_sums(data.data_ptr(), to, num_bytes, offset // 8, *sums)

    def mixed(self, key: int) -> tuple[int, int]:
        """One word of the rows' sums and one of the columns', each sum mixed with its place and a 64-bit ``key``."""
        library, flipped = kernel(), key ^ WORD
        if library is not None:
            rows, columns = self.rows.ctypes.data, self.columns.ctypes.data
            return (
                library.mixed(rows, len(self.rows), key, 0),
                library.mixed(columns, ROW_WORDS, 0, flipped),
            )
        return _mixed(self.rows, key, 0), _mixed(self.columns, 0, flipped)

    def _take_by_numpy(self, data: torch.Tensor) -> None:
        words = data.numpy().view(np.uint64).reshape(-1, ROW_WORDS)
        for first in range(0, len(words), _BLOCK_ROWS):
            part = words[first : first + _BLOCK_ROWS]
            np.add.reduce(part, axis=1, out=self.rows[first : first + _BLOCK_ROWS])
            self.columns += np.add.reduce(part, axis=0)


def tensor_digest(tensor: torch.Tensor, key: int) -> str:
    """32 hexadecimal digits over the bytes of a tensor of any dtype, laid out row by row, where it lies.

    ``key``: 64 bits. With a key that the other side could not know, an equal digest was computed now, and not kept from
    an earlier look. What it can and can't see: ``refit/buckets.py``.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(data) == 0:
        return f"{0:032x}"
    num_whole = len(data) // ROW_BYTES * ROW_BYTES
    if data.device.type == "cpu" and kernel() is not None:
        sums = RowSums(num_whole + ROW_BYTES)
        sums.take(data, 0, None)
    else:
        sums = RowSums.of(torch.nn.functional.pad(data, (0, num_whole + ROW_BYTES - len(data))))
    first, second = sums.mixed(mix(mix(key & WORD) + len(data) & WORD))
    return f"{first:016x}{second:016x}"


def mix(word: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection in which every bit reaches every bit."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def _mix_each(words: np.ndarray) -> np.ndarray:
    """``mix`` of every word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mixed(sums: np.ndarray, added: int, flipped: int) -> int:
    places = np.arange(1, len(sums) + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(added)
    return int(np.sum(_mix_each(sums ^ _mix_each(places ^ np.uint64(flipped))), dtype=np.uint64))


@cache
def kernel() -> Any:
    """The compiled ``row_sums.c``, or None where it can't be had or disagrees with numpy."""
    try:
        library = load_kernel(Path(__file__).with_suffix(".c"))
    except NoKernel:
        return None
    library.row_sums.restype = None
    library.row_sums.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_long] * 2, *[ctypes.c_void_p] * 2]
    library.mixed.restype = ctypes.c_uint64
    library.mixed.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_uint64, ctypes.c_uint64]
    return library if _agrees(library) else None


def _agrees(library: Any) -> bool:
    """Whether the kernel's sums of odd pieces are numpy's of the whole, and its copy is one."""
    data = np.random.default_rng(0).integers(0, 256, 3 * ROW_BYTES, np.uint8)
    copied, rows, columns = np.zeros_like(data), np.zeros(3, np.uint64), np.zeros(ROW_WORDS, np.uint64)
    for begin, end in ((0, 8), (8, 5000), (5000, 3 * ROW_BYTES)):
        source, target = data[begin:end].ctypes.data, copied[begin:end].ctypes.data
        library.row_sums(source, target, end - begin, begin // 8, rows.ctypes.data, columns.ctypes.data)
    words = data.view(np.uint64).reshape(-1, ROW_WORDS)
    same_sums = np.array_equal(rows, words.sum(1)) and np.array_equal(columns, words.sum(0))
    key = 0xFEDCBA9876543210
    same_mix = library.mixed(columns.ctypes.data, ROW_WORDS, key, key ^ WORD) == _mixed(columns, key, key ^ WORD)
    return same_sums and same_mix and np.array_equal(copied, data)
