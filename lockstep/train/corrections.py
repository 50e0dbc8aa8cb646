"""Corrections of mismatched or stale samples, and which settings cost an extra pass of the trainer.

d = l_v − l_roll per token: the trainer at the version that sampled, minus what the engine reported. *Weights* scale the
loss, detached, and leave the denominators alone (truncated importance sampling: Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training"; verl's rollout correction). *Rejections* change the mask, and so
also the denominators unless ``denominator = "fixed"`` (IcePop: Ling Team 2025; masked importance sampling; geometric
mean and veto: verl). All quantities use the mask from before any correction, so the order of rejections is immaterial.
The token-level weight ``tis`` needs no pass beforehand and is computed in ``objective.PolicyObjective``.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.config.schema import AlgorithmConfig, CorrectionConfig
from lockstep.interfaces import LogProbs
from lockstep.records import BoolArray, Sequence, TrainSequence

LOG_RATIO_LIMIT = 20.0
"""Bound of a log-ratio before it is exponentiated, as in ``losses``."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """``items`` with their new masks and weights; the overrides of ``Batch`` (None: count the masks); metrics."""

    items: tuple[TrainSequence, ...]
    denominator_tokens: int | None
    denominator_rollouts: int | None
    metrics: dict[str, float]


def extra_pass_reasons(config: AlgorithmConfig) -> tuple[str, ...]:
    """Settings that need the trainer's log-probs of the whole batch before its backward, by name; empty: none do."""
    corrections = config.corrections
    reasons = [f"corrections.reject {kind}" for kind in corrections.reject]
    if corrections.weight == "tis_seq":
        reasons.append("corrections.weight tis_seq")
    if config.kl.place == "reward":
        reasons.append("kl.place reward")
    if config.advantage == "distill" and not corrections.bypass:
        reasons.append("advantage distill")
    if config.optimizer_steps_per_batch > 1 and not corrections.bypass:
        reasons.append(f"optimizer_steps_per_batch {config.optimizer_steps_per_batch}")
    return tuple(reasons)


def needs_extra_pass(config: AlgorithmConfig) -> bool:
    """Whether ``live`` log-probs must be computed before the backward."""
    return bool(extra_pass_reasons(config))


def apply_corrections(
    items: Seq[TrainSequence], live: Mapping[str, LogProbs] | None, config: CorrectionConfig
) -> Corrected:
    """Weights and rejections for the items of *one optimizer step* (its denominators are counted here).

    ``live`` maps each ``sequence_id`` to l_v; it may be None if no setting needs it (weight off or tis, no rejection).
    A token whose d is not finite lies outside every interval: a rejection drops it, a weight stays NaN; it is counted
    in ``corrections/nonfinite`` and fails the gate on agreement, which uses the mask from before.

    Raises ValueError for bypass with a weight, and for log-probs that are needed and missing or of the wrong length.
    """
    if config.bypass and config.weight != "off":
        raise ValueError("corrections.bypass already anchors the ratio at the engine: it excludes correction weights")
    if config.weight != "tis_seq" and not config.reject:
        return Corrected(tuple(items), None, None, {})
    tally = _Tally()
    corrected = tuple(_correct(item, live, config, tally) for item in items)
    tokens, rollouts = _denominators(items) if config.denominator == "fixed" else (None, None)
    return Corrected(corrected, tokens, rollouts, tally.metrics(config))


def finite_logprobs(kind: str, source: Mapping[str, LogProbs] | None, sequence: Sequence) -> NDArray[np.float64]:
    """Log-probs [T] of ``sequence`` from ``source``, checked: present, of the right length, finite where sampled."""
    values = aligned_logprobs(kind, source, sequence).astype(np.float64)
    bad = np.flatnonzero(sequence.loss_mask & ~np.isfinite(values))
    if len(bad):
        raise ValueError(f"{kind} log-prob of sequence {sequence.sequence_id} at position {bad[0]} is {values[bad[0]]}")
    return values


def aligned_logprobs(kind: str, source: Mapping[str, LogProbs] | None, sequence: Sequence) -> NDArray[np.float32]:
    """Log-probs [T] of ``sequence`` from ``source``, present and of the right length. Raises ValueError otherwise."""
    if source is None:
        raise ValueError(
            f"these settings need {kind} log-probs of every sequence before the advantages; none were given"
        )
    if sequence.sequence_id not in source:
        raise ValueError(f"no {kind} log-probs for sequence {sequence.sequence_id}")
    values = source[sequence.sequence_id].logprobs
    if len(values) != len(sequence.tokens):
        raise ValueError(
            f"sequence {sequence.sequence_id}: {len(values)} {kind} log-probs for {len(sequence.tokens)} tokens"
        )
    return values


class _Tally:
    """Counts over the items of one call."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.ratio_sum = 0.0
        self.num_ratios = 0

    def add(self, name: str, count: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + count

    def metrics(self, config: CorrectionConfig) -> dict[str, float]:
        names = ["rejected_tokens", "rejected_sequences", "nonfinite"]
        names += [f"{kind}_tokens" if kind == "icepop" else f"{kind}_sequences" for kind in config.reject]
        if config.weight == "tis_seq":
            names.append("tis_seq_clipped_sequences")
        result = {f"corrections/{name}": float(self.counts.get(name, 0)) for name in names}
        if self.num_ratios:
            result["corrections/ratio_mean"] = self.ratio_sum / self.num_ratios
        return result


def _correct(
    item: TrainSequence, live: Mapping[str, LogProbs] | None, config: CorrectionConfig, tally: _Tally
) -> TrainSequence:
    mask = item.loss_mask
    if not mask.any():
        return item
    l_live = aligned_logprobs("live", live, item.sequence)
    d = l_live[mask].astype(np.float64) - item.sequence.logprobs[mask]
    ratio = _exp(d)  # raw: the share that a weight clips is counted apart
    tally.add("nonfinite", int((~np.isfinite(d)).sum()))
    tally.ratio_sum += float(ratio[np.isfinite(d)].sum())
    tally.num_ratios += int(np.isfinite(d).sum())

    kept = _kept(d, ratio, config, tally)
    tally.add("rejected_tokens", int((~kept).sum()))
    tally.add("rejected_sequences", int(not kept.any()))
    new_mask = mask.copy()
    new_mask[mask] = kept

    values = None
    if config.weight == "tis_seq":
        raw = float(_exp(d.sum()))
        clipped = float(np.clip(raw, config.weight_low, config.weight_high))
        tally.add("tis_seq_clipped_sequences", int(raw != clipped))
        values = np.full(len(d), clipped)
    elif config.weight == "off" and "icepop" in config.reject and not config.bypass:
        values = np.where(kept, ratio, 1.0)  # the tokens that IcePop keeps keep their ratio as weight
    if values is None:
        return replace(item, loss_mask=new_mask)
    weights = np.ones(len(mask), dtype=np.float32)
    weights[mask] = values if item.weights is None else values * item.weights[mask]
    return replace(item, loss_mask=new_mask, weights=weights)


def _kept(d: NDArray[np.float64], ratio: NDArray[np.float64], config: CorrectionConfig, tally: _Tally) -> BoolArray:
    """Which of a sequence's M tokens survive all rejections."""
    kept = np.ones(len(d), dtype=bool)
    if "icepop" in config.reject:
        inside = _inside(ratio, config.icepop_low, config.icepop_high)
        tally.add("icepop_tokens", int((~inside).sum()))
        kept &= inside
    whole = {
        "mis": lambda: bool(_inside(_exp(d.sum()), config.mis_low, config.mis_high)),
        "geometric": lambda: bool(_inside(_exp(d.mean()), config.geometric_low, config.geometric_high)),
        "veto": lambda: bool(np.all(np.exp(np.minimum(d, 0.0)) >= config.veto)),  # NaN compares False: vetoed
    }
    for kind, survives in whole.items():
        if kind in config.reject and not survives():
            tally.add(f"{kind}_sequences", 1)
            kept[:] = False
    return kept


def _exp(d: NDArray[np.float64] | float) -> NDArray[np.float64]:
    return np.exp(np.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _inside(value: NDArray[np.float64], low: float, high: float) -> BoolArray:
    return (value >= low) & (value <= high)  # NaN is inside of nothing


def _denominators(items: Seq[TrainSequence]) -> tuple[int, int]:
    """N and B of the given masks: tokens that count, and rollouts with at least one."""
    tokens = sum(int(i.loss_mask.sum()) for i in items)
    return tokens, len({i.rollout_id for i in items if i.loss_mask.any()})
