"""Per-token policy losses, KL estimators and their aggregation: pure functions of flat float32 tensors [M].

M counts the tokens with ``loss_mask`` 1 of one micro-batch. Everything is minimised. Throughout, x = l − l_old is the
log-ratio of the live log-prob to its anchor and r = exp(clamp(x, ±20)) the ratio; y = l_ref − l. Bounds are applied to
the *argument* of an exponential, never only to its result: behind an overflowing exponential a bound gives 0 · inf =
NaN in the backward pass although the forward is finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound of every log-ratio before it is exponentiated (exp(20) is about 4.9e8)."""

KL_LIMIT = 10.0
"""Bound of a token's k2 or k3 value. A token at the bound has no gradient."""

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"]
KlEstimator = Literal["k1", "k2", "k3", "kl_unbiased"]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A policy loss per token, and what its clipping did. ``loss`` [M] carries the gradient, the rest is detached.

    ``ratio`` [M] is the raw ratio, before any clip. ``clipped_low`` and ``clipped_high`` [M] bool mark tokens whose
    loss differs from the unclipped one; ``dual_clipped`` [M] bool those held by the dual clip.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor


@dataclass(frozen=True, slots=True)
class TokenKl:
    """A KL estimate per token: ``value`` [M] with its gradient, ``clamped`` [M] bool where a bound took effect."""

    value: Tensor
    clamped: Tensor


def ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """r = exp(clamp(l − l_old, ±20)) per token; no gradient beyond the bound."""
    return torch.exp(_wide(logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def ppo_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """max(−A r, −A clip(r, 1 − clip_low, 1 + clip_high)) (Schulman et al. 2017; two bounds: DAPO, Yu et al. 2025).

    ``dual_clip`` c > 1: where A < 0 the loss is at most −A c (Ye et al. 2020).
    """
    r = ratio(logprobs, old)
    loss, low, high = _clipped_surrogate(r, advantages, clip_low, clip_high)
    held = torch.zeros_like(low)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        held = (advantages < 0) & (loss.detach() > ceiling)
        loss = torch.where(held, ceiling, loss)
    return TokenLoss(loss, r.detach(), low, high, held)


def gspo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """GSPO-token (Zheng et al. 2025): the clipped surrogate of the *sequence* ratio exp(mean_t x).

    s_t = exp(l − sg[l] + sg[k_i]) has the value of the sequence's ratio and the gradient of the token's own log-prob.
    k_i is the **mean** log-ratio, so that its noise falls with the length instead of growing. Meant to be aggregated by
    ``seq_mean_token_mean``.
    """
    x = _wide(logprobs - old).detach()
    sums = torch.zeros(num_sequences, dtype=x.dtype, device=x.device).index_add_(0, sequence_index, x)
    counts = torch.zeros_like(sums).index_add_(0, sequence_index, torch.ones_like(x))
    mean_log_ratio = (sums / counts.clamp(min=1)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[sequence_index]
    s = torch.exp(logprobs - logprobs.detach() + mean_log_ratio)
    loss, low, high = _clipped_surrogate(s, advantages, clip_low, clip_high)
    return TokenLoss(loss, s.detach(), low, high, torch.zeros_like(low))


def cispo(logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> TokenLoss:
    """−sg[clip(r, 1 − clip_low, 1 + clip_high)] A l (MiniMax-M1, 2025): the weight is clipped, never the gradient."""
    r = ratio(logprobs, old).detach()
    loss = -r.clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs
    low, high = r < 1 - clip_low, r > 1 + clip_high
    return TokenLoss(loss, r, low, high, torch.zeros_like(low))


def reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor) -> TokenLoss:
    """−A l (Williams 1992). The ratio is reported, not used."""
    none = torch.zeros_like(logprobs, dtype=torch.bool)
    return TokenLoss(-advantages * logprobs, ratio(logprobs, old).detach(), none, none, none)


def sft(logprobs: Tensor) -> Tensor:
    """−l per token: supervised fine-tuning."""
    return -logprobs


def kl(estimator: KlEstimator, logprobs: Tensor, old: Tensor, reference: Tensor) -> TokenKl:
    """KL to the reference per token, for the loss (estimators: Schulman, "Approximating KL divergence", 2020).

    k2 = sg[r] y²/2 has the gradient of the reverse KL(π‖ref), on-policy and (through sg[r]) off-policy. k3 =
    exp(y) − 1 − y has that of KL(ref‖π). ``kl_unbiased`` = r k3 with r live has that of the reverse KL also off-policy
    (DeepSeek-V3.2, 2025). y is bounded by ±20 and the value of k2 and k3 by 10; a token at a bound has no gradient.

    Raises ValueError for k1, whose expected gradient in a loss is zero.
    """
    if estimator == "k1":
        raise ValueError(
            "KL estimator k1 in the loss has zero expected gradient: use k2, k3, kl_unbiased, or the reward"
        )
    y = _wide(reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    unbounded = y.square() / 2 if estimator == "k2" else torch.expm1(y) - y
    value = unbounded.clamp(-KL_LIMIT, KL_LIMIT)
    clamped = unbounded > KL_LIMIT  # also wherever y is at its bound: both estimators are above 18 there
    if estimator == "k2":
        value = ratio(logprobs, old).detach() * value
    elif estimator == "kl_unbiased":
        value = ratio(logprobs, old) * value
        value = torch.where(clamped, value.detach(), value)  # r is live: its share of the gradient must go as well
    return TokenKl(value, clamped.detach())


def aggregate(
    values: Tensor,
    kind: Aggregation,
    *,
    tokens_per_rollout: Tensor,
    num_tokens: int,
    num_rollouts: int,
    length_norm: int | None = None,
) -> Tensor:
    """A micro-batch's share of the global loss: a scalar, to be *summed* over micro-batches and ranks.

    ``num_tokens`` N, ``num_rollouts`` B and ``tokens_per_rollout`` [M] len_i belong to the whole optimizer batch, so
    any split into micro-batches or ranks changes the loss and its gradient by rounding only. No values give 0.

    Raises ValueError when there are tokens but a denominator is not positive, or ``token_sum_norm`` has no length_norm.
    """
    if kind == "token_sum_norm" and length_norm is None:
        raise ValueError("aggregation token_sum_norm needs length_norm (a constant number of tokens)")
    if values.numel() and (num_tokens <= 0 or num_rollouts <= 0):
        raise ValueError(
            f"{values.numel()} tokens to aggregate, but the global batch claims {num_tokens} tokens "
            f"of {num_rollouts} rollouts: count both over the whole optimizer batch"
        )
    if kind == "token_mean":
        return values.sum() / max(num_tokens, 1)
    if kind == "seq_mean_token_mean":
        return (values / tokens_per_rollout).sum() / max(num_rollouts, 1)
    return values.sum() / (max(num_rollouts, 1) * (length_norm or 1 if kind == "token_sum_norm" else 1))


def _wide(values: Tensor) -> Tensor:
    """At least float32: exp(20) is infinite in float16."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _clipped_surrogate(
    r: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(max(−A r, −A clip(r)), clipped from below, clipped from above): the pessimistic bound of PPO."""
    loss = torch.maximum(-advantages * r, -advantages * r.clamp(1 - clip_low, 1 + clip_high))
    raw = r.detach()
    low = (advantages < 0) & (raw < 1 - clip_low)
    high = (advantages > 0) & (raw > 1 + clip_high)
    return loss, low, high
