"""The fixture ``lane_evidence``: a test's gates, recorded with their values whether they pass or not, then asserted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from lockstep.lanes.evidence import Gate


class GateFailed(AssertionError):
    """A value does not keep its bound."""


class Recorder:
    """Gates of one test. Each method records, then raises ``GateFailed`` if the bound is not kept."""

    def __init__(self) -> None:
        self.gates: list[Gate] = []

    def gate(self, name: str, value: float, bound: float, sense: Literal["at_most", "at_least"] = "at_most") -> None:
        """A value against a bound; NaN and infinities fail."""
        self._judge(Gate(name, float(value), float(bound), sense))

    def series(
        self,
        name: str,
        values: Sequence[float],
        bound: float,
        *,
        quantile: float = 0.5,
        outlier: float | None = None,
        sense: Literal["at_most", "at_least"] = "at_most",
    ) -> None:
        """A quantile of a series against a bound, so that one spike does not fail a night's run.

        Values beyond ``outlier`` are an alarm of their own: kept in the evidence and listed by ``lanes debt``. A value
        that is not finite is never a spike: it fails. Raises ``ValueError`` for no values or a quantile outside 0 to 1.
        """
        if not values or not 0 <= quantile <= 1:
            raise ValueError(f"{name}: {len(values)} values, quantile {quantile}; needs a value, and 0 ≤ quantile ≤ 1")
        ordered = sorted(map(float, values))
        finite = all(map(math.isfinite, ordered))
        beyond = [
            value
            for value in ordered
            if outlier is not None and (value > outlier if sense == "at_most" else value < outlier)
        ]
        value = _quantile(ordered, quantile) if finite else math.nan
        self._judge(Gate(name, value, float(bound), sense, tuple(beyond)))

    def claim(self, name: str, state: Literal["held", "failed", "not checked"]) -> None:
        """A claim of a receipt: only *held* passes. Raises ``ValueError`` for another state."""
        if state not in ("held", "failed", "not checked"):
            raise ValueError(f"{name}: state {state!r}; known: held, failed, not checked")
        gate = Gate(name, float(state == "held"), 1.0, "held")
        self.gates.append(gate)
        if not gate.passed:
            raise GateFailed(f"claim {name}: {state}")

    def _judge(self, gate: Gate) -> None:
        self.gates.append(gate)
        if not gate.passed:
            raise GateFailed(f"gate {gate.text()}")


def _quantile(ordered: Sequence[float], quantile: float) -> float:
    """Linear between neighbours, as ``numpy.quantile``."""
    place = quantile * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
