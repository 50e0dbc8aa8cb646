"""Sampling token ids from logits, with the log-prob of the distribution they were drawn from.

The distribution of a row is softmax(logits / temperature), cut by top-k, then top-p, then min-p, renormalised:

- top-k keeps exactly k ids; among equal logits the lower id wins.
- top-p keeps the shortest run of ids, by falling probability (of what top-k left, renormalised; equal: lower id
  first), whose mass reaches top_p; at least one id.
- min-p keeps ids whose probability is at least min_p times that of the likeliest id.

Temperature 0 takes the argmax (lowest id among equals) and reports its log-prob at temperature 1, uncut.

Drawing is an inverse CDF on two levels: sums over blocks of 256 ids, one search over the blocks, one search inside the
chosen block. That costs one exponential and one sum over the vocabulary, where softmax plus multinomial costs tens of
times as much on a CPU. Sums run in float64 over float32 exponentials, and both searches look for the first cumulated
value *above* the target, so an id of probability zero can't be drawn, whatever the uniform number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.records import SamplingParams

_BLOCK = 256
_ROWS_AT_ONCE = 16  # rows whose exponentials exist at once: keeps the working set near the cache


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of n rows as columns; build once per change of the running set."""

    temperatures: torch.Tensor  # [n, 1] float32, 1 where greedy
    greedy: torch.Tensor | None  # [n] bool, None: no row is
    truncated: tuple[tuple[int, SamplingParams], ...]  # rows that need top-k, top-p or min-p
    unit_temperature: bool  # every row samples at temperature 1

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> SamplingBatch:
        """Columns of ``params``, in order."""
        temperatures = [p.temperature if p.temperature > 0 else 1.0 for p in params]
        greedy = [p.temperature == 0 for p in params]
        truncated = tuple(
            (row, p)
            for row, p in enumerate(params)
            if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)
        )
        return cls(
            temperatures=torch.tensor(temperatures, dtype=torch.float32)[:, None],
            greedy=torch.tensor(greedy) if any(greedy) else None,
            truncated=truncated,
            unit_temperature=all(t == 1.0 for t in temperatures),
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """``tokens`` [n] int64 and ``logprobs`` [n] float32. Where ``valid`` is False the row held NaN, +Inf or nothing
    but -Inf: its token and log-prob mean nothing and must not be used."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    valid: torch.Tensor


def sample(logits: torch.Tensor, batch: SamplingBatch, uniforms: np.ndarray) -> Sampled:
    """Draw one id per row of ``logits`` [n, V] (any float dtype) with ``uniforms`` [n] in (0, 1)."""
    rows = logits.shape[0]
    tokens = torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows, dtype=torch.float32)
    valid = torch.empty(rows, dtype=torch.bool)
    draws = torch.from_numpy(np.ascontiguousarray(uniforms, dtype=np.float64))
    truncated = dict(batch.truncated)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = slice(start, min(start + _ROWS_AT_ONCE, rows))
        scaled = logits[part].float()
        if not batch.unit_temperature:
            scaled = scaled / batch.temperatures[part]
        for row in range(part.start, part.stop):
            if row in truncated:
                scaled = scaled.clone() if scaled.data_ptr() == logits[part].data_ptr() else scaled
                scaled[row - start] = truncate(scaled[row - start], truncated[row])
        tokens[part], logprobs[part], valid[part] = _draw(
            scaled, draws[part], None if batch.greedy is None else batch.greedy[part]
        )
    return Sampled(tokens, logprobs, valid)


def _draw(
    scaled: torch.Tensor, draws: torch.Tensor, greedy: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, log-probs, valid) of ``scaled`` [n, V] float32: two-level inverse CDF, argmax where ``greedy``."""
    rows, vocabulary = scaled.shape
    num_blocks = -(-vocabulary // _BLOCK)
    top = scaled.amax(dim=1, keepdim=True)  # NaN and +Inf come through; -Inf only if every logit is -Inf
    weights = torch.empty(rows, num_blocks * _BLOCK, dtype=torch.float32)
    weights[:, vocabulary:] = 0
    torch.sub(scaled, top, out=weights[:, :vocabulary])
    weights[:, :vocabulary].exp_()
    blocks = weights.view(rows, num_blocks, _BLOCK)
    cumulated = blocks.sum(dim=2).double().cumsum(dim=1)
    total = cumulated[:, -1:]
    valid = (torch.isfinite(top) & torch.isfinite(total))[:, 0]

    target = torch.minimum(draws[:, None] * total, _just_below(total))
    block = torch.searchsorted(cumulated, target, right=True).clamp_(max=num_blocks - 1)
    before = torch.where(block > 0, cumulated.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(rows, 1, _BLOCK))[:, 0].double().cumsum(dim=1)
    # The block's float64 sum may fall short of its float32 sum by a rounding: stay below it.
    rest = torch.minimum(target - before, _just_below(inside[:, -1:]))
    offset = torch.searchsorted(inside, rest, right=True).clamp_(max=_BLOCK - 1)
    tokens = (block * _BLOCK + offset).clamp_(max=vocabulary - 1)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], _argmax(scaled), tokens)
    logprobs = scaled.gather(1, tokens).double() - top.double() - total.log()
    return tokens[:, 0], logprobs[:, 0].float(), valid


def _just_below(values: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(values, torch.zeros((), dtype=values.dtype))


def _argmax(scaled: torch.Tensor) -> torch.Tensor:
    """Lowest id of the maximum, [n, 1]. ``torch.argmax`` leaves open which of equal maxima it returns."""
    top = scaled.amax(dim=1, keepdim=True)
    return (scaled == top).to(torch.uint8).argmax(dim=1, keepdim=True)


def truncate(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """``scaled`` [V] (logits divided by the temperature) with every id outside the kept set at -Inf."""
    order = scaled.argsort(descending=True, stable=True)
    kept = order[: params.top_k] if 0 < params.top_k < len(order) else order
    probabilities = scaled[kept].double().softmax(dim=0)
    if params.top_p < 1.0:
        mass_before = probabilities.cumsum(dim=0) - probabilities
        count = max(1, int((mass_before < params.top_p).sum()))
        kept, probabilities = kept[:count], probabilities[:count]
    if params.min_p > 0.0:
        kept = kept[probabilities >= params.min_p * probabilities[0]]
    cut = torch.full_like(scaled, float("-inf"))
    cut[kept] = scaled[kept]
    return cut
