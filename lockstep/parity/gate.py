"""The verdict on a step's agreement, given after forward-backward and before the optimizer moves.

any non-finite token ────────────► fails, whatever the mean
no eligible token ───────────────► unjudged, never a pass; ``unjudged_patience`` in a row stop the run
metric > bound ──────────────────► fails        (a failure is "stop" or "warn", as configured)
else ────────────────────────────► pass
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.agreement import Agreement, Bucket, TokenPair
from lockstep.config.schema import GateConfig

Status = Literal["pass", "warn", "stop", "unjudged"]

OUTLIER = 10.0
"""A bucket whose mean is this many times that of every other one is named as the place to look first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``value`` is None where nothing was measured; ``tokens`` are the finite eligible ones behind it."""

    status: Status
    metric: str
    value: float | None
    bound: float
    tokens: int
    sentence: str


class Gate:
    """Judges each step against one absolute bound. Its only state is the count of unjudged steps in a row."""

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        self.num_unjudged_in_row = 0

    def judge(self, agreement: Agreement, step: int, describe: Callable[[TokenPair], str] | None = None) -> Verdict:
        """The verdict on ``agreement``. ``describe`` tells the worst token in words (``parity.measure.token_context``).

        Raises ValueError if tokens were measured but the configured metric is missing.
        """
        if agreement.unjudged:
            return self._unjudged(agreement, step)
        self.num_unjudged_in_row = 0
        metric, bound, tokens = self.config.metric, self.config.bound, agreement.num_tokens
        value = agreement.metrics.get(metric)
        if agreement.num_nonfinite:
            head = (
                f"step {step}: {agreement.num_nonfinite} log-prob pairs are not finite, which fails the gate "
                f"whatever {metric} is ({_number(value)} over the {tokens} finite tokens, bound {bound:g})"
            )
            return self._failed(agreement, value, head, describe)
        if value is None:
            raise ValueError(f"{tokens} tokens were measured, but the agreement has no metric {metric!r}")
        if value <= bound:
            sentence = f"step {step}: {metric} {_number(value)} is within the bound {bound:g} over {tokens} tokens"
            return Verdict("pass", metric, value, bound, tokens, sentence)
        head = f"step {step}: {metric} {_number(value)} is above the bound {bound:g} over {tokens} tokens"
        return self._failed(agreement, value, head, describe)

    def state(self) -> dict[str, int]:
        """What a resumed run needs."""
        return {"num_unjudged_in_row": self.num_unjudged_in_row}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Take up a saved ``state``. Raises KeyError if it is of something else."""
        self.num_unjudged_in_row = int(state["num_unjudged_in_row"])

    def _failed(
        self, agreement: Agreement, value: float | None, head: str, describe: Callable[[TokenPair], str] | None
    ) -> Verdict:
        parts = [f"{head} (bound from: {self.config.reason})"]
        worst = agreement.worst
        if worst is not None:
            place = describe(worst) if describe is not None else f"row {worst.row}, token {worst.column}"
            parts.append(f"worst: {place}, trainer {_number(worst.train)}, engine {_number(worst.rollout)}")
        parts.append(f"try: {advice(agreement)}")
        return Verdict(
            self.config.action, self.config.metric, value, self.config.bound, agreement.num_tokens, "; ".join(parts)
        )

    def _unjudged(self, agreement: Agreement, step: int) -> Verdict:
        self.num_unjudged_in_row += 1
        count, patience = self.num_unjudged_in_row, self.config.unjudged_patience
        why = (
            f"all {agreement.num_stale} sampled tokens are of other versions than the trainer's"
            if agreement.num_stale
            else "no token was sampled"
        )
        sentence = f"step {step}: unjudged, because {why} ({count} in a row; {patience} stop the run)"
        if count >= patience:
            sentence += "; try: check that refits reach the engine, or score fixed probes at each refit"
        status: Status = "stop" if count >= patience else "unjudged"
        return Verdict(status, self.config.metric, None, self.config.bound, 0, sentence)


def advice(agreement: Agreement) -> str:
    """Where to look first, from what stands out in the measurement."""
    if agreement.num_nonfinite:
        return (
            "find the side that is not finite; −Inf on a sampled token means that the two sides mask different ids, "
            "NaN that a forward overflowed"
        )
    if (name := _outlier(agreement.buckets.get("replica", {}))) is not None:
        return f"only replica {name} is far off: compare its last refit receipt and refit it"
    if _outlier(agreement.buckets.get("routes", {})) == "flipped":
        return "the difference sits on tokens whose experts differ: record and replay routes"
    if _outlier(agreement.buckets.get("position", {})) == "0":
        return "only the first sampled token is far off: compare the prompt's tokens, mask and positions on both sides"
    metrics = agreement.metrics
    if metrics.get("abs_diff/p50", 0.0) * 3 > metrics.get("abs_diff/mean", 0.0):
        return (
            "most tokens are off: check that the engine serves the trainer's version (last refit receipt), that both "
            "sides use the same temperature, and that index t is token t on both sides"
        )
    return "few tokens are far off: compare the engine's prefill and decode scores, and both sides in float32"


def _outlier(buckets: Mapping[str, Bucket]) -> str | None:
    """The label whose mean exceeds every other one ``OUTLIER`` times; None without at least two."""
    ordered = sorted(buckets.items(), key=lambda kv: kv[1].abs_diff_mean, reverse=True)
    if len(ordered) < 2:
        return None
    (name, first), (_, second) = ordered[:2]
    return name if first.abs_diff_mean > OUTLIER * second.abs_diff_mean else None


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4g}"
