"""How far a metric moves by chance: rollouts are resampled with replacement, the same ones on both sides.

Repeating a scoring pass on a CPU gives the same numbers again, so repetition shows no noise; what is random is which
rollouts were sampled. Tokens of one rollout are not independent, therefore whole rollouts are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

Rollouts = Seq[np.ndarray]
"""Finite d = l_train − l_roll of the tokens of each rollout."""

NUM_RESAMPLES = 500
CONFIDENCE = 0.99
_EXP_LIMIT = 600.0


METRICS = ("abs_diff/mean", "abs_diff/p50", "abs_diff/p99", "abs_diff/max", "k3", "mult_error")
"""Metrics that this file knows; the others need more than d."""
_QUANTILES = {"abs_diff/p50": 0.5, "abs_diff/p99": 0.99, "abs_diff/max": 1.0}


def metric_value(metric: str, d: np.ndarray) -> float:
    """A gate metric of d [n], as ``lockstep.agreement`` defines it. Raises ValueError for another name or no token."""
    if not len(d):
        raise ValueError(f"{metric} of no token is undefined")
    if metric in _QUANTILES:
        return float(np.quantile(np.abs(d), _QUANTILES[metric]))
    return float(_by_token(metric, d).mean())


def _by_token(metric: str, d: np.ndarray) -> np.ndarray:
    """Values whose mean is the metric."""
    values = d.astype(np.float64)
    if metric == "abs_diff/mean":
        return np.abs(values)
    if metric == "k3":
        return np.expm1(np.clip(values, -_EXP_LIMIT, _EXP_LIMIT)) - values
    if metric == "mult_error":
        return np.exp(np.minimum(np.abs(values), _EXP_LIMIT))
    raise ValueError(f"no metric {metric!r} to resample; there are {', '.join(METRICS)}")


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a bootstrap interval at ``CONFIDENCE``."""

    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Chance alone could have made it nothing."""
        return self.low <= 0.0 <= self.high


def resampled(metric: str, cases: Seq[Rollouts], seed: int = 0) -> np.ndarray:
    """The metric of each case under ``NUM_RESAMPLES`` draws of rollouts, the same draw for all cases: [cases, draws].

    Raises ValueError if the cases have different numbers of rollouts.
    """
    counts = {len(case) for case in cases}
    if len(counts) != 1:
        raise ValueError(f"the cases have {sorted(counts)} rollouts; they must be of the same batch")
    num = counts.pop()
    draws = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), size=NUM_RESAMPLES)
    if metric in _QUANTILES:
        return np.array([[_drawn(metric, case, draw) for draw in draws] for case in cases])
    rows = []
    for case in cases:
        sums = np.array([_by_token(metric, d).sum() for d in case])
        sizes = draws @ np.array([len(d) for d in case], dtype=np.float64)
        with np.errstate(invalid="ignore"):
            rows.append(np.where(sizes > 0, draws @ sums / sizes, np.nan))
    return np.array(rows)


def _drawn(metric: str, case: Rollouts, draw: np.ndarray) -> float:
    d = np.concatenate([np.tile(d, times) for d, times in zip(case, draw, strict=True) if times])
    return metric_value(metric, d) if len(d) else float("nan")


def interval(contrast: np.ndarray) -> Interval:
    """The interval of a contrast of resampled values [draws]; draws without a token are left out."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(contrast, [tail, 1 - tail])
    return Interval(float(low), float(high))
