"""Rewards → advantages → training sequences.

``prepare`` turns a rollout batch into the items that a trainer sees. Per group of samples of one prompt it picks the
baseline (finished and scored samples), shapes the rewards, and spreads one advantage per rollout over its tokens, or
computes one per token. Everything is float64 until it is stored as float32.

    rollout ──status, score──► baseline or excluded (mask all False, still seen by the agreement measure)
       └─ raw reward → overlong shaping → truncation penalty → KL in the reward = s ──group──► A
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.config.schema import AlgorithmConfig
from lockstep.interfaces import LogProbs
from lockstep.records import BoolArray, Rollout, Sequence, TrainSequence
from lockstep.train.corrections import LOG_RATIO_LIMIT, aligned_logprobs, finite_logprobs

Float64Array = NDArray[np.float64]
Exclusion = Literal["aborted", "abstained", "empty"]

GRPO_EPS = 1e-6
WHITEN_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Prepared:
    """``items``: one per sequence, in the order of the rollouts. ``metrics``: counts (``num_…``, ``…_groups``) and
    means; a mean over nothing is absent."""

    items: tuple[TrainSequence, ...]
    metrics: dict[str, float]


# --- pure formulas ----------------------------------------------------------------------------------------------------


def grpo(rewards: Float64Array) -> Float64Array:
    """(s − mean) / (std + 1e-6) over the G samples of a group, std with G − 1 (DeepSeekMath, Shao et al. 2024).

    Equal rewards give exactly 0.
    """
    centred = dr_grpo(rewards)
    if not centred.any():
        return centred
    return centred / (np.std(rewards, ddof=1) + GRPO_EPS)


def dr_grpo(rewards: Float64Array) -> Float64Array:
    """s − mean (Liu et al. 2025, "Understanding R1-Zero-like training"). Equal rewards give exactly 0."""
    if len(rewards) == 0 or np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)  # the mean of equal numbers may differ from them in the last bit
    return rewards - rewards.mean()


def rloo(rewards: Float64Array) -> Float64Array:
    """s minus the mean of the *other* samples = G/(G − 1) (s − mean) (Kool et al. 2019; Ahmadian et al. 2024)."""
    num = len(rewards)
    return dr_grpo(rewards) * (num / (num - 1)) if num > 1 else np.zeros_like(rewards)


def returns_to_go(rewards: Float64Array, gamma: float) -> Float64Array:
    """R_t = r_t + γ R_{t+1} over the tokens of one trajectory."""
    returns = np.empty_like(rewards)
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = returns[t] = rewards[t] + gamma * running
    return returns


def whiten(values: Float64Array) -> Float64Array:
    """(v − mean) / sqrt(var + 1e-8), var with n − 1 (REINFORCE++, Hu 2025). Fewer than two values are returned as they
    are; equal values give exactly 0."""
    if len(values) < 2:
        return values
    if np.all(values == values[0]):
        return np.zeros_like(values)
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + WHITEN_EPS)


_GROUP_FORMULAS: dict[str, Callable[[Float64Array], Float64Array]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp_baseline": dr_grpo,
}


# --- groups -----------------------------------------------------------------------------------------------------------


def informative_groups(rollouts: Seq[Rollout]) -> tuple[str, ...]:
    """Ids of groups worth training on, in order of first appearance: DAPO dynamic sampling (Yu et al. 2025).

    A group is informative if the *raw* task metric of its finished, scored samples is not all equal:
    ``score.correct`` where all of them have it, else the raw reward. Shaping (overlong, truncation, KL) must not count,
    or an all-wrong group survives because its lengths differ.
    """
    informative = []
    for group_id, members in _by_group(rollouts).items():
        scored = [r for r in members if _exclusion(r) is None]
        correct = [r.score.correct for r in scored]
        metric = [r.score.reward for r in scored] if None in correct else correct
        if len(set(metric)) > 1:
            informative.append(group_id)
    return tuple(informative)


def _by_group(rollouts: Seq[Rollout]) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    return groups


def _exclusion(rollout: Rollout, *, needs_reward: bool = True) -> Exclusion | None:
    """Why a rollout is no sample of the policy that can be learned from; None if it is one.

    A rollout without a single sampled token was never sampled (a stop token counts as sampled), whatever its status.
    """
    if rollout.status in ("aborted", "failed"):
        return "aborted"
    if needs_reward and rollout.score.reward is None:
        return "abstained"
    return "empty" if rollout.num_sampled_tokens == 0 else None


def _check_groups(rollouts: Seq[Rollout], group_size: int) -> None:
    """Raises ValueError unless all G samples of each prompt, and nothing else, share a group id."""
    for group_id, members in _by_group(rollouts).items():
        if len(members) != group_size:
            raise ValueError(
                f"group {group_id!r} has {len(members)} rollouts, but algorithm.group_size is {group_size}: all "
                "samples of a prompt share one group_id (aborted and failed ones stay in the batch with that status)"
            )
    ids = [s.sequence_id for r in rollouts for s in r.sequences]
    if len(set(ids)) != len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise ValueError(f"sequence_id {twice!r} occurs more than once in the batch: ids must be unique")


# --- from rollouts to items -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sample:
    """A rollout on its way: its masks after the truncation policy and its shaped reward (None: excluded)."""

    rollout: Rollout
    masks: tuple[BoolArray, ...]
    exclusion: Exclusion | None
    shaped: float | None
    overlong: float
    kl: tuple[Float64Array, ...] | None  # k1 per token, [T] per sequence, 0 where not sampled


def prepare(
    rollouts: Seq[Rollout],
    config: AlgorithmConfig,
    *,
    max_new_tokens: int | None = None,
    teacher: Mapping[str, LogProbs] | None = None,
    reference: Mapping[str, LogProbs] | None = None,
    live: Mapping[str, LogProbs] | None = None,
) -> Prepared:
    """Advantages and training sequences of a whole rollout batch.

    ``teacher``, ``reference`` and ``live`` (the trainer at the version that sampled) map every ``sequence_id`` to
    log-probs. ``live`` given becomes the anchor of the ratio; otherwise the batch is on-policy (``old_logprobs`` None),
    or anchored at the engine's log-probs under ``corrections.bypass``. ``max_new_tokens`` is L_max of overlong shaping.

    Excluded rollouts (aborted, failed, every reward abstained, nothing sampled) leave the baseline; their items stay,
    with an all-False mask and advantage 0, so that the agreement measure still sees their tokens.

    Raises ValueError for a group of the wrong size, a non-finite reward, or log-probs that are needed and missing, of
    the wrong length or not finite.
    """
    _check_groups(rollouts, config.group_size)
    if config.advantage == "distill" and config.kl.place == "reward":
        raise ValueError("distill takes no reward, so kl.place = 'reward' has no effect: use 'loss' or 'off'")
    samples = [_sample(r, config, max_new_tokens, reference, live) for r in rollouts]
    if config.advantage == "distill":
        advantages = _distill(samples, config, teacher, live)
        gaps = [
            -a[m] for s, arrays in zip(samples, advantages, strict=True) for m, a in zip(s.masks, arrays, strict=True)
        ]
        tokens = np.concatenate([np.zeros(0), *gaps])
        # k1 estimate of KL(π‖teacher), which distillation lowers
        extra = {"teacher_kl/mean": float(tokens.mean())} if len(tokens) else {}
    elif config.advantage == "reinforce_pp":
        advantages, extra = _per_token(samples, config)
    else:
        advantages, extra = _per_group(samples, config)
    items = []
    for sample, per_sequence in zip(samples, advantages, strict=True):
        for sequence, mask, values in zip(sample.rollout.sequences, sample.masks, per_sequence, strict=True):
            items.append(_item(sample.rollout, sequence, mask, values, config, reference, live))
    return Prepared(tuple(items), _metrics(samples, config) | extra)


def _sample(
    rollout: Rollout,
    config: AlgorithmConfig,
    max_new_tokens: int | None,
    reference: Mapping[str, LogProbs] | None,
    live: Mapping[str, LogProbs] | None,
) -> _Sample:
    exclusion = _exclusion(rollout, needs_reward=config.advantage != "distill")
    hidden = exclusion is not None or (rollout.status == "truncated" and config.truncated == "mask")
    masks = tuple(np.zeros_like(s.loss_mask) if hidden else s.loss_mask.copy() for s in rollout.sequences)
    if exclusion is not None or config.advantage == "distill":
        return _Sample(rollout, masks, exclusion, None, 0.0, None)
    shaped = float(rollout.score.reward or 0.0)
    if not np.isfinite(shaped):
        raise ValueError(
            f"rollout {rollout.rollout_id}: reward {shaped} is not finite; a grader that fails returns None"
        )
    overlong = _overlong(rollout, config, max_new_tokens)
    shaped += overlong
    if rollout.status == "truncated" and config.truncated == "penalise":
        shaped -= config.truncated_penalty
    kl = None
    if config.kl.place == "reward":
        kl = tuple(_k1(s, reference, live) for s in rollout.sequences)
        if config.advantage != "reinforce_pp":  # there the KL is a reward per token
            shaped -= config.kl.coefficient * float(sum(k.sum() for k in kl))
    return _Sample(rollout, masks, None, shaped, overlong, kl)


def _overlong(rollout: Rollout, config: AlgorithmConfig, max_new_tokens: int | None) -> float:
    """DAPO's soft overlong punishment: factor · min(0, (L_max − L_buf − len) / L_buf), in units of the reward."""
    factor, buffer = config.overlong.factor, config.overlong.buffer_tokens
    if factor == 0:
        return 0.0
    if max_new_tokens is None or buffer <= 0:
        raise ValueError("overlong shaping needs max_new_tokens and overlong.buffer_tokens above 0")
    return factor * min(0.0, (max_new_tokens - buffer - rollout.num_sampled_tokens) / buffer)


def _k1(
    sequence: Sequence, reference: Mapping[str, LogProbs] | None, live: Mapping[str, LogProbs] | None
) -> Float64Array:
    """k1 = l_v − l_ref per sampled token, bounded by ±20; 0 elsewhere."""
    mask = sequence.loss_mask
    values = np.zeros(len(mask))
    l_ref = finite_logprobs("reference", reference, sequence)[mask]
    l_live = finite_logprobs("live", live, sequence)[mask]
    values[mask] = np.clip(l_live - l_ref, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return values


def _per_group(samples: Seq[_Sample], config: AlgorithmConfig) -> tuple[list[list[Float64Array]], dict[str, float]]:
    formula = _GROUP_FORMULAS[config.advantage]
    groups: dict[str, list[_Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.rollout.group_id, []).append(sample)
    scalars: dict[str, float] = {}
    degenerate = uniform = 0
    alone: set[str] = set()
    for group in groups.values():
        members = [s for s in group if s.shaped is not None]
        rewards = np.array([s.shaped for s in members], dtype=np.float64)
        if len(members) < 2:
            degenerate += 1
            alone.update(s.rollout.rollout_id for s in members)
        elif np.all(rewards == rewards[0]):
            uniform += 1
        values = formula(rewards) if len(members) > 1 else np.zeros(len(members))
        scalars.update({s.rollout.rollout_id: float(a) for s, a in zip(members, values, strict=True)})
    spread = [[np.where(m, scalars.get(s.rollout.rollout_id, 0.0), 0.0) for m in s.masks] for s in samples]
    metrics = {"degenerate_groups": float(degenerate), "uniform_groups": float(uniform)}
    if config.advantage == "reinforce_pp_baseline":
        metrics |= _whiten_in_place(samples, spread)
        for sample, values in zip(samples, spread, strict=True):
            if (
                sample.rollout.rollout_id in alone
            ):  # whitening shifts its 0 by the mean: a lone survivor teaches nothing
                for array in values:
                    array[:] = 0.0
    return spread, metrics


def _per_token(samples: Seq[_Sample], config: AlgorithmConfig) -> tuple[list[list[Float64Array]], dict[str, float]]:
    """REINFORCE++: the reward on the last counted token of the rollout (its sequences in order are one trajectory),
    minus the KL per token if it is in the reward; return-to-go; whitened over the batch."""
    result = []
    for sample in samples:
        arrays = [np.zeros(len(m)) for m in sample.masks]
        mask = np.concatenate(sample.masks) if sample.masks else np.zeros(0, dtype=bool)
        if sample.shaped is not None and mask.any():
            rewards = np.zeros(int(mask.sum()))
            if sample.kl is not None:
                rewards -= config.kl.coefficient * np.concatenate(sample.kl)[mask]
            rewards[-1] += sample.shaped
            flat = np.zeros(len(mask))
            flat[mask] = returns_to_go(rewards, config.gamma)
            arrays = np.split(flat, np.cumsum([len(m) for m in sample.masks])[:-1])
        result.append(arrays)
    return result, _whiten_in_place(samples, result)


def _whiten_in_place(samples: Seq[_Sample], advantages: list[list[Float64Array]]) -> dict[str, float]:
    """Whiten over all counted tokens of the batch; says so (``not_whitened``) where there are fewer than two."""
    pairs = [
        (a, m) for s, arrays in zip(samples, advantages, strict=True) for a, m in zip(arrays, s.masks, strict=True)
    ]
    values = np.concatenate([a[m] for a, m in pairs]) if pairs else np.zeros(0)
    whitened = whiten(values)
    start = 0
    for array, mask in pairs:
        count = int(mask.sum())
        array[mask] = whitened[start : start + count]
        start += count
    return {"not_whitened": 1.0} if len(values) < 2 else {}


def _distill(
    samples: Seq[_Sample],
    config: AlgorithmConfig,
    teacher: Mapping[str, LogProbs] | None,
    live: Mapping[str, LogProbs] | None,
) -> list[list[Float64Array]]:
    """On-policy distillation: A_t = l_teacher − l_old per token (the negative k1 of KL(π‖teacher))."""
    result = []
    for sample in samples:
        arrays = []
        for sequence, mask in zip(sample.rollout.sequences, sample.masks, strict=True):
            values = np.zeros(len(mask))
            if mask.any():
                if config.corrections.bypass:
                    old = sequence.logprobs.astype(np.float64)
                else:
                    old = finite_logprobs("live", live, sequence)
                values[mask] = finite_logprobs("teacher", teacher, sequence)[mask] - old[mask]
            arrays.append(values)
        result.append(arrays)
    return result


def _item(
    rollout: Rollout,
    sequence: Sequence,
    mask: BoolArray,
    advantages: Float64Array,
    config: AlgorithmConfig,
    reference: Mapping[str, LogProbs] | None,
    live: Mapping[str, LogProbs] | None,
) -> TrainSequence:
    counts = bool(mask.any())  # what is masked whole needs neither anchor nor reference
    old = None
    if config.corrections.bypass:
        old = sequence.logprobs
    elif live is not None and counts:
        old = aligned_logprobs("live", live, sequence)
    ref = None
    if config.kl.place == "loss" and config.kl.coefficient > 0 and counts:
        ref = aligned_logprobs("reference", reference, sequence)
    return TrainSequence(
        sequence=sequence,
        rollout_id=rollout.rollout_id,
        loss_mask=mask,
        advantages=advantages.astype(np.float32),
        old_logprobs=old,
        ref_logprobs=ref,
    )


def _metrics(samples: Seq[_Sample], config: AlgorithmConfig) -> dict[str, float]:
    def count(exclusion: Exclusion) -> float:
        return float(sum(s.exclusion == exclusion for s in samples))

    metrics = {
        "num_rollouts": float(len(samples)),
        "num_excluded": float(sum(s.exclusion is not None for s in samples)),
        "num_aborted": count("aborted"),
        "num_abstained": count("abstained"),
        "num_empty": count("empty"),
        "num_truncated": float(sum(s.rollout.status == "truncated" for s in samples)),
        "num_loss_tokens": float(sum(int(m.sum()) for s in samples for m in s.masks)),
    }
    rewards = [s.rollout.score.reward for s in samples if s.exclusion is None and s.rollout.score.reward is not None]
    if rewards:
        metrics["reward/mean"] = float(np.mean(rewards))
    shaped = [s.shaped for s in samples if s.shaped is not None]
    if shaped:
        metrics["shaped_reward/mean"] = float(np.mean(shaped))
    kl = [k[seq.loss_mask] for s in samples if s.kl for k, seq in zip(s.kl, s.rollout.sequences, strict=True)]
    if kl:
        metrics["reward_kl/mean"] = float(np.mean(np.concatenate(kl)))
    if config.overlong.factor > 0:
        metrics["num_overlong"] = float(sum(s.overlong < 0 for s in samples))
    return metrics
