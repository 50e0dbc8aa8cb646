"""The verdict on a step's agreement, given after forward-backward and before the optimizer moves.

any non-finite token ────────────► stop, whatever the means and the action are
no eligible token ───────────────► unjudged, never a pass; ``unjudged_patience`` in a row stop the run
a bounded metric fails ──────────► the configured action: stop, warn, or correct from the next step on
a metric above its bound ────────► warn, while hysteresis (``history.py``) still waits
else ────────────────────────────► pass

With ``correct`` the first failure switches ``gate.correction`` on for the rest of the run. A correction repairs a
mismatch of rounding; a value far above its bound while it is on stops the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Literal

from lockstep.agreement import Agreement, Bucket, TokenPair
from lockstep.config.schema import AlgorithmConfig, BoundConfig, CorrectionConfig, GateConfig
from lockstep.parity.history import Finding, History

Status = Literal["pass", "warn", "correct", "stop", "unjudged"]
Describe = Callable[[TokenPair], str]

OUTLIER = 10.0
"""A bucket whose mean is this many times that of every other one is named as the place to look first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one step, of the metric that decided it (the first one bounded if all pass).

    ``value`` is None where nothing was measured; ``tokens`` are the finite eligible ones behind it; ``evidence`` is
    that of the bound; ``correcting_since``: the step from which on the gate's correction is in force, if it is.
    ``bounds``: every metric that is bounded in this run, with its bound.
    """

    status: Status
    metric: str
    value: float | None
    bound: float
    tokens: int
    sentence: str
    evidence: str
    correcting_since: int | None = None
    bounds: tuple[tuple[str, float], ...] = ()

    def flat(self) -> dict[str, str | float]:
        """The verdict as metrics of a step."""
        row: dict[str, str | float] = {"agreement/metric": self.metric, "agreement/bound": self.bound}
        row |= {"verdict/status": self.status, "verdict/sentence": self.sentence, "verdict/evidence": self.evidence}
        if self.correcting_since is not None:
            row["verdict/correcting_since"] = self.correcting_since
        return row | {f"bound/{metric}": bound for metric, bound in self.bounds}


class Gate:
    """Judges each step against the bounds of this run's hardware and dtypes.

    State: the judged values that hysteresis and drift look back on, the count of unjudged steps in a row, and since
    when the gate's correction is in force.
    """

    def __init__(self, config: GateConfig, bounds: Seq[BoundConfig]) -> None:
        """``bounds``: those that fit (``config.gate_checks.bounds_for``). Raises ValueError if there is none."""
        if not bounds:
            raise ValueError("a gate without a bound would pass everything")
        self.config = config
        self.bounds = tuple(bounds)
        self.num_unjudged_in_row = 0
        self.correcting_since: int | None = None
        self._histories = {bound.metric: History() for bound in bounds}

    def judge(
        self,
        agreement: Agreement,
        step: int,
        describe: Describe | None = None,
        *,
        num_dropped_groups: int = 0,
        num_unseen: int = 0,
    ) -> Verdict:
        """The verdict on ``agreement``. ``describe`` tells the worst token in words (``parity.measure.token_context``);
        ``num_dropped_groups``: groups that were sampled for this step and left out of it by dynamic sampling;
        ``num_unseen``: sampled tokens that the trainer has not scored at their version, which the sentence admits.

        Raises ValueError if tokens were measured but a bounded metric is missing.
        """
        verdict = self._judge(agreement, step, describe, num_dropped_groups)
        if not num_unseen:
            return verdict
        admits = f"{num_unseen} sampled tokens more are not judged: later optimizer steps of this batch score them"
        return replace(verdict, sentence=f"{verdict.sentence}; {admits}")

    def _judge(self, agreement: Agreement, step: int, describe: Describe | None, num_dropped_groups: int) -> Verdict:
        if agreement.unjudged:
            return self._unjudged(agreement, step, num_dropped_groups)
        self.num_unjudged_in_row = 0
        broken = [b for b in self.bounds if not math.isfinite(agreement.metrics.get(b.metric, 0.0))]
        if agreement.num_nonfinite or broken:
            return self._nonfinite(agreement, step, broken[0] if broken else self.bounds[0], describe)
        findings = [self._find(agreement, bound) for bound in self.bounds]
        worst = max(findings, key=lambda finding: finding.rank)
        if worst.level == "within":
            first = findings[0]
            rest = "".join(f"; {f.bound.metric} {_number(f.value)} within {f.bound.bound:g}" for f in findings[1:])
            return self._verdict("pass", first.bound, first.value, agreement, step, [_head(first, step) + rest])
        head = f"{_head(worst, step)} (bound from: {evidence_text(worst.bound)})"
        status, consequence = self._consequence(worst, step)
        parts = [head, *consequence, *_where_to_look(agreement, describe, drifts=worst.value <= worst.bound.bound)]
        return self._verdict(status, worst.bound, worst.value, agreement, step, parts)

    def algorithm(self, configured: AlgorithmConfig) -> AlgorithmConfig:
        """The algorithm in force at the next step: ``configured``, or with the gate's correction once that is on."""
        if self.correcting_since is None:
            return configured
        return configured.model_copy(update={"corrections": self.config.correction})

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as plain values."""
        return {
            "num_unjudged_in_row": self.num_unjudged_in_row,
            "correcting_since": self.correcting_since,
            "histories": {metric: history.state() for metric, history in self._histories.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up a saved ``state``; a metric that is bounded only now starts anew. Raises KeyError if it is of
        something else."""
        since, saved = state["correcting_since"], state["histories"]
        self.num_unjudged_in_row = int(state["num_unjudged_in_row"])
        self.correcting_since = None if since is None else int(since)
        self._histories = {
            b.metric: History.of(saved[b.metric]) if b.metric in saved else History() for b in self.bounds
        }

    def _find(self, agreement: Agreement, bound: BoundConfig) -> Finding:
        value = agreement.metrics.get(bound.metric)
        if value is None:
            raise ValueError(f"{agreement.num_tokens} tokens were measured, but there is no metric {bound.metric!r}")
        return self._histories[bound.metric].judge(value, agreement.num_tokens, bound, self.config)

    def _consequence(self, worst: Finding, step: int) -> tuple[Status, list[str]]:
        """The status of a finding that is not within, and what the sentence says about it."""
        if worst.level == "breach":
            return "warn", []
        if self.config.action != "correct":
            return self.config.action, []
        if self.correcting_since is None:
            self.correcting_since = step + 1
            return "correct", [f"correction {correction_text(self.config.correction)} is on from the next step"]
        if worst.far:
            return "stop", ["far above the bound, which the correction that is on is not made for"]
        return "correct", []

    def _nonfinite(self, agreement: Agreement, step: int, bound: BoundConfig, describe: Describe | None) -> Verdict:
        value, count = agreement.metrics.get(bound.metric), agreement.num_nonfinite
        what = f"{count} log-prob pairs are not finite" if count else f"{bound.metric} is not finite"
        head = (
            f"step {step}: {what}, which stops the run whatever the means are "
            f"({bound.metric} {_number(value)} over the {agreement.num_tokens} finite tokens, bound {bound.bound:g})"
        )
        return self._verdict("stop", bound, value, agreement, step, [head, *_where_to_look(agreement, describe)])

    def _unjudged(self, agreement: Agreement, step: int, num_dropped_groups: int) -> Verdict:
        self.num_unjudged_in_row += 1
        count, patience = self.num_unjudged_in_row, self.config.unjudged_patience
        why, attempt = _unjudged_reason(agreement, num_dropped_groups)
        parts = [f"step {step}: unjudged, because {why} ({count} in a row; {patience} stop the run)"]
        if count >= patience:
            parts.append(f"try: {attempt}")
        status: Status = "stop" if count >= patience else "unjudged"
        return self._verdict(status, self.bounds[0], None, agreement, step, parts)

    def _verdict(
        self, status: Status, bound: BoundConfig, value: float | None, agreement: Agreement, step: int, parts: list[str]
    ) -> Verdict:
        since = self.correcting_since
        if since is not None and since <= step:
            parts = [*parts, f"correction {correction_text(self.config.correction)} is on since step {since}"]
        sentence, tokens = "; ".join(parts), agreement.num_tokens
        every = tuple((b.metric, b.bound) for b in self.bounds)
        return Verdict(status, bound.metric, value, bound.bound, tokens, sentence, evidence_text(bound), since, every)


def evidence_text(bound: BoundConfig) -> str:
    """A bound's evidence, and whether it stands for this hardware."""
    return bound.evidence if bound.shown else f"{bound.evidence}; not shown on this hardware"


def correction_text(correction: CorrectionConfig) -> str:
    """A correction by the names of what it switches on."""
    names = [correction.weight] if correction.weight != "off" else []
    return " + ".join([*names, *correction.reject])


def _head(finding: Finding, step: int) -> str:
    return f"step {step}: {finding.bound.metric} {_number(finding.value)} {finding.why}"


def _unjudged_reason(agreement: Agreement, num_dropped_groups: int) -> tuple[str, str]:
    """Why no token was eligible, and what to try. Stale tokens come first: dropped ones were not measured."""
    if agreement.num_stale:
        return (
            f"all {agreement.num_stale} sampled tokens are of other versions than the trainer's",
            "check that refits reach the engine, or score fixed probes at each refit",
        )
    if num_dropped_groups:
        groups = "the only sampled group" if num_dropped_groups == 1 else f"all {num_dropped_groups} sampled groups"
        return (
            f"dynamic sampling dropped {groups} (no two completions of a group differ in reward), so that there "
            "is nothing to train on",
            "harder problems if rewards are near their maximum, easier ones if near zero; data of which not "
            "everything is learned yet; or a higher algorithm.dynamic_sampling.max_refill_rounds",
        )
    return "no token was sampled", "check that the engine completes requests and that completions are not empty"


def _where_to_look(agreement: Agreement, describe: Describe | None, *, drifts: bool = False) -> list[str]:
    """The worst token in context, and what to try; ``drifts``: the value itself is within the bound."""
    parts, worst = [], agreement.worst
    if worst is not None:
        place = describe(worst) if describe is not None else f"row {worst.row}, token {worst.column}"
        apart = f", apart by {_number(worst.badness)}" if math.isfinite(worst.badness) else ""
        parts.append(f"worst: {place}, trainer {_number(worst.train)}, engine {_number(worst.rollout)}{apart}")
    slow = "compare the refitted engine with one that is loaded afresh from the same weights"
    return [*parts, f"try: {slow if drifts else advice(agreement)}"]


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
