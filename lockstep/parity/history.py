"""One bounded metric over a run's judged steps: when a value above its bound is a failure, and when the run drifts.

value ≤ bound                                     ─▶ within, unless the run drifts
value > far_factor × bound, min_tokens or more    ─▶ failure at once
value > bound on ``breaches`` of ``window`` steps ─▶ failure
value > bound otherwise                           ─▶ breach: said and counted, no failure yet
median of the window > drift_factor × baseline    ─▶ failure, though every value may be within the bound

The baseline is the median of the first ``baseline_steps`` judged values. In a healthy run agreement gets better as the
policy grows surer, so a median several times the first ones is a fault that grows slowly. Medians on both sides, since
single steps are odd for harmless reasons. A baseline of 0 (first steps that agreed bit for bit) or less has no multiple
that could be a limit: there is no drift then, and the bound alone judges. Breach and drift both need the value of this
very step to be too large, so that a run that has recovered passes, and a smaller value never gets the worse finding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from lockstep.config.schema import BoundConfig, GateConfig

Level = Literal["within", "breach", "failure"]
LEVELS: tuple[Level, ...] = ("within", "breach", "failure")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one metric shows at one step. ``far``: beyond hysteresis; ``why`` follows "step 3: abs_diff/mean 0.2"."""

    bound: BoundConfig
    value: float
    level: Level
    far: bool
    why: str

    @property
    def rank(self) -> tuple[int, float]:
        """Orders findings: the worse level first, then the larger share of the bound."""
        return LEVELS.index(self.level), self.value / self.bound.bound


@dataclass
class History:
    """Judged values of one metric: ``first`` of the run (the baseline) and the ``recent`` window, oldest first."""

    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)

    def judge(self, value: float, tokens: int, bound: BoundConfig, config: GateConfig) -> Finding:
        """Take in the finite ``value`` of a step over ``tokens`` tokens, and judge it."""
        if len(self.first) < config.baseline_steps:
            self.first.append(value)
        self.recent = [*self.recent, value][-config.window :]
        limit, far = bound.bound, value > config.far_factor * bound.bound
        breaches = sum(v > limit for v in self.recent)
        drift = self._drift(value, config)
        if value > limit:
            is_far = far and tokens >= config.min_tokens
            fails = is_far or breaches >= config.breaches or drift is not None
            count = f"breach {breaches} in {config.window} judged steps, of which {config.breaches} are a failure"
            why = f"is above the bound {limit:g} over {tokens} tokens, {'far above it' if is_far else count}"
            return Finding(bound, value, "failure" if fails else "breach", is_far, why)
        why = f"is within the bound {limit:g} over {tokens} tokens"
        return Finding(bound, value, "within" if drift is None else "failure", False, why + (drift or ""))

    def _drift(self, value: float, config: GateConfig) -> str | None:
        """Words for a drift away from the run's own first steps; None without one, or without a baseline above 0."""
        if not config.baseline_steps or len(self.first) < config.baseline_steps or len(self.recent) < config.window:
            return None
        start, now = median(self.first), median(self.recent)
        if start <= 0 or value <= config.drift_factor * start or now <= config.drift_factor * start:
            return None
        return (
            f", but the run drifts: the median of the last {len(self.recent)} judged steps, {now:.4g}, is above "
            f"{config.drift_factor:g} × {start:.4g}, the median of the first {len(self.first)}"
        )

    def state(self) -> dict[str, list[float]]:
        """Plain numbers, as JSON keeps them exactly."""
        return {"first": list(self.first), "recent": list(self.recent)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> History:
        """The history with that ``state``. Raises KeyError if it is of something else, ValueError if not finite."""
        first, recent = [[float(v) for v in state[name]] for name in ("first", "recent")]
        if not all(map(math.isfinite, first + recent)):
            raise ValueError(f"a history of judged values holds one that is not finite: {state}")
        return cls(first, recent)
