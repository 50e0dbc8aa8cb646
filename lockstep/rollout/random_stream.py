"""One uniform number per sampled token, from (request seed, token index) and nothing else.

A counter-based generator has no state to carry, so a request draws the same stream whatever else is in the batch,
after a pause, and in another order. The mix is SplitMix64's finaliser (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014), applied to the seed and then to seed and counter together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers [n] in the open interval (0, 1), one for each (seed, token index) pair; multiples of 2**-53 plus half."""
    with np.errstate(over="ignore"):  # wrapping around is the point
        stream = _mix((seeds + np.uint64(1)) * _GOLDEN)
        bits = _mix(stream + (indices + np.uint64(1)) * _GOLDEN)
    # 52 bits, so that adding the half is exact and neither end of the interval is reached.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def as_seed(seed: int) -> np.uint64:
    """Any Python integer as 64 bits."""
    return np.uint64(seed & 0xFFFFFFFFFFFFFFFF)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MIX_A
    value = (value ^ (value >> np.uint64(27))) * _MIX_B
    return value ^ (value >> np.uint64(31))
