"""Quantiles that can be merged: counts in bins of equal *relative* width, so the error is relative to the value.

A positive x lies in bin ceil(log x / log γ), γ = (1 + α) / (1 − α), and is told as 2 γ^bin / (γ + 1), which is within
α·x of it: α = ``RELATIVE_ERROR``. Values below ``SMALLEST`` are told as 0. Merging adds counts, so any split of the
data gives the same sketch, and its quantiles (numpy's linear interpolation) are within α of the exact ones: both
neighbours are. The bins are those of DDSketch (Masson, Rim and Lee, VLDB 2019). Needs torch only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

RELATIVE_ERROR = 0.005
SMALLEST = 1e-12
ZERO_BIN = -(2**31)

_LOG_GAMMA = math.log1p(RELATIVE_ERROR) - math.log1p(-RELATIVE_ERROR)

Counts = dict[int, int]
"""How many values each bin holds."""


def bins_of(values: Tensor) -> Tensor:
    """Bin [N] of values [N] ≥ 0 (int64)."""
    bins = torch.ceil(torch.log(values.double().clamp(min=SMALLEST)) / _LOG_GAMMA).long()
    return torch.where(values < SMALLEST, ZERO_BIN, bins)


def value_of(index: int) -> float:
    """What a bin stands for: within ``RELATIVE_ERROR`` of each of its values."""
    return 0.0 if index == ZERO_BIN else 2 * math.exp(index * _LOG_GAMMA) / (math.exp(_LOG_GAMMA) + 1)


def counts_of(values: Tensor) -> Counts:
    """The sketch of values [N] ≥ 0."""
    bins, counts = torch.unique(bins_of(values), return_counts=True)
    return dict(zip(bins.tolist(), counts.tolist(), strict=True))


def merge_counts(sketches: Iterable[Mapping[int, int]]) -> Counts:
    """The sketch of all values together."""
    merged: Counts = {}
    for sketch in sketches:
        for index, count in sketch.items():
            merged[index] = merged.get(index, 0) + count
    return merged


def quantiles(counts: Mapping[int, int], shares: Sequence[float]) -> list[float]:
    """The value below which each share of the values lies; needs at least one value."""
    ordered = sorted(counts.items())
    total = sum(counts.values())

    def at(rank: int) -> float:
        seen = 0
        for index, count in ordered:
            seen += count
            if rank < seen:
                return value_of(index)
        raise ValueError(f"there is no value of rank {rank} among {total}")

    result = []
    for share in shares:
        place = share * (total - 1)
        low = int(place)
        first, second = at(low), at(min(low + 1, total - 1))
        result.append(first + (second - first) * (place - low))
    return result
