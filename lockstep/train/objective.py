"""What is minimised: ``PolicyObjective`` of an ``AlgorithmConfig`` and ``SupervisedObjective``.

Per token: correction weight (detached) × policy loss + coefficient × KL to the reference. One aggregation reduces the
sum of both terms, so that a KL coefficient means the same whatever the lengths are. Metrics are sums over tokens, made
into means by ``means``; a ratio is reported raw, and the share of clipped tokens apart from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.config.schema import AlgorithmConfig
from lockstep.interfaces import LossOutput, LossTokens
from lockstep.records import TrainSequence
from lockstep.train import losses
from lockstep.train.losses import Aggregation, TokenLoss


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The policy loss of ``config``. Pure; implements ``interfaces.Objective``.

    The token-level correction ``tis`` is computed here, from ``tokens.old − tokens.rollout`` (l_v − l_roll), because it
    needs no pass before the backward; all other corrections arrive in ``tokens.weights`` and in the mask.

    Sums: ``ratio`` (raw), ``clip_low``, ``clip_high``, with dual clip ``dual_clip``; with KL in the loss ``kl`` (as in
    the loss) and ``kl_clamped``; with tis ``tis_ratio`` (raw) and ``tis_clipped``.

    Raises ValueError at construction for settings that contradict each other.
    """

    config: AlgorithmConfig

    def __post_init__(self) -> None:
        config = self.config
        if self._kl_in_loss and config.kl.estimator == "k1":
            raise ValueError("kl.estimator k1 in the loss has zero expected gradient: use k2, k3 or kl_unbiased")
        if config.loss == "gspo" and config.aggregation != "seq_mean_token_mean":
            raise ValueError(f"loss gspo needs aggregation seq_mean_token_mean, not {config.aggregation}")
        if config.dual_clip is not None and config.loss != "ppo_clip":
            raise ValueError(f"dual_clip belongs to loss ppo_clip, not to {config.loss}: remove it")
        if config.aggregation == "token_sum_norm" and config.length_norm is None:
            raise ValueError("aggregation token_sum_norm needs length_norm (a constant number of tokens)")
        if config.corrections.bypass and config.corrections.weight != "off":
            raise ValueError(
                "corrections.bypass already anchors the ratio at the engine: it excludes correction weights"
            )

    @property
    def _kl_in_loss(self) -> bool:
        return self.config.kl.place == "loss" and self.config.kl.coefficient > 0

    def __call__(self, tokens: LossTokens) -> LossOutput:
        """This micro-batch's share of the global loss, and its detached sums (float64 scalars)."""
        config = self.config
        policy = self._policy_loss(tokens)
        sums = {
            "ratio": _total(policy.ratio),
            "clip_low": _total(policy.clipped_low),
            "clip_high": _total(policy.clipped_high),
        }
        if config.dual_clip is not None:
            sums["dual_clip"] = _total(policy.dual_clipped)
        weights = tokens.weights.detach()
        if config.corrections.weight == "tis":
            limit = losses.LOG_RATIO_LIMIT
            raw = torch.exp((tokens.old.detach() - tokens.rollout).clamp(-limit, limit))
            clipped = raw.clamp(config.corrections.weight_low, config.corrections.weight_high)
            weights = weights * clipped
            sums["tis_ratio"], sums["tis_clipped"] = _total(raw), _total(raw != clipped)
        values = weights * policy.loss
        if self._kl_in_loss:
            if tokens.reference is None:
                raise ValueError("KL in the loss needs the reference's log-probs, and the batch brought none")
            divergence = losses.kl(config.kl.estimator, tokens.logprobs, tokens.old, tokens.reference)
            values = values + config.kl.coefficient * divergence.value
            sums["kl"], sums["kl_clamped"] = _total(divergence.value), _total(divergence.clamped)
        return LossOutput(_aggregate(values, config.aggregation, tokens, config.length_norm), sums)

    def needs_gradient(self, item: TrainSequence) -> bool:
        """False iff the item's gradient is exactly zero: nothing to train on, or all advantages 0 and no KL."""
        if not item.loss_mask.any():
            return False
        return self._kl_in_loss or bool((item.advantages[item.loss_mask] != 0).any())

    def _policy_loss(self, tokens: LossTokens) -> TokenLoss:
        config = self.config
        live, old, advantages = tokens.logprobs, tokens.old.detach(), tokens.advantages
        low, high = config.clip_low, config.clip_high
        if config.loss == "ppo_clip":
            return losses.ppo_clip(live, old, advantages, clip_low=low, clip_high=high, dual_clip=config.dual_clip)
        if config.loss == "gspo":
            index, count = tokens.sequence_index, tokens.num_sequences
            return losses.gspo(live, old, advantages, index, count, clip_low=low, clip_high=high)
        if config.loss == "cispo":
            return losses.cispo(live, old, advantages, clip_low=low, clip_high=high)
        return losses.reinforce(live, old, advantages)


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """−l over the tokens that count (supervised fine-tuning). Sum: ``nll``, in nats."""

    aggregation: Aggregation = "token_mean"

    def __call__(self, tokens: LossTokens) -> LossOutput:
        """This micro-batch's share of the global loss."""
        values = losses.sft(tokens.logprobs)
        return LossOutput(_aggregate(values, self.aggregation, tokens, None), {"nll": _total(values)})

    def needs_gradient(self, item: TrainSequence) -> bool:
        """False iff no token counts."""
        return bool(item.loss_mask.any())


def means(sums: Mapping[str, float | Tensor], num_tokens: int) -> dict[str, float]:
    """Sums over all micro-batches (and ranks) divided by N. With N = 0 a mean is undefined: absent, not 0."""
    if num_tokens == 0:
        return {}
    return {name: float(value) / num_tokens for name, value in sums.items()}


def _aggregate(values: Tensor, kind: Aggregation, tokens: LossTokens, length_norm: int | None) -> Tensor:
    return losses.aggregate(
        values,
        kind,
        tokens_per_rollout=tokens.tokens_per_rollout,
        num_tokens=tokens.num_tokens,
        num_rollouts=tokens.num_rollouts,
        length_norm=length_norm,
    )


def _total(values: Tensor) -> Tensor:
    return values.detach().sum(dtype=torch.float64)
