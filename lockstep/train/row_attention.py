"""Attention for packed sequences on a CPU: the model sees one row without padding, attention sees short rows.

torch's fused CPU attention has a slow backward at short lengths (bfloat16, 64 rows of 56 positions: 192 ms a layer
where the products below take 18 ms, one thread), and one long packed row would make attention quadratic in the whole
micro-batch. So tokens lie one after another for the linears, are spread into rows of a tree each for the scores, and
gathered again. Key heads are not expanded: the queries of a group of heads are further rows of one product.

Registered with transformers' attention interface as ``lockstep_rows``; the layout comes as the keyword ``row_layout``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

IMPLEMENTATION = "lockstep_rows"

_DENSE_WIDTH = 256
"""Longest row whose probabilities [heads, n, n] are kept for the backward; longer rows go to torch's own attention."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the N tokens of a packed forward lie in [R, W] rows, and who sees whom there."""

    places: torch.Tensor  # [N] int64, flat position row * W + column of each token
    allowed: torch.Tensor  # [R, 1, W, W] bool
    bias: torch.Tensor  # [R, 1, 1, W, W] float32: 0 where allowed, else very negative

    @classmethod
    def of(cls, places: torch.Tensor, allowed: torch.Tensor) -> RowLayout:
        """Layout from places [N] and the mask [R, 1, W, W]; padding must be allowed to see something."""
        bias = torch.zeros(allowed.shape, dtype=torch.float32, device=allowed.device).masked_fill_(~allowed, -1e30)
        return cls(places, allowed, bias[:, :, None])


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    row_layout: RowLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query [1, H, N, D] over key and value [1, K, N, D] within ``row_layout``; returns [1, N, H, Dv]."""
    del module, attention_mask
    if dropout:
        raise ValueError("attention dropout is not supported: a policy's log-probs must not be random")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [N, heads, D]
    if row_layout.allowed.shape[-1] <= _DENSE_WIDTH:
        return _Dense.apply(*tokens, row_layout, scale)[None], None  # pyright: ignore[reportOptionalSubscript]
    rows, width = row_layout.allowed.shape[0], row_layout.allowed.shape[-1]
    spread = [_spread(t, row_layout).view(rows, width, *t.shape[1:]).transpose(1, 2) for t in tokens]
    output = F.scaled_dot_product_attention(
        *spread, attn_mask=row_layout.allowed, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).flatten(0, 1)[row_layout.places][None], None


@contextmanager
def row_attention(config: Any) -> Iterator[None]:
    """Make a model of this configuration use ``attention`` while the block runs (forward, and any recomputation)."""
    _register()
    before = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if IMPLEMENTATION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, lambda *_args, **_kwargs: None)


def _spread(tokens: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """[N, …] into zeroed [R * W, …]."""
    size = layout.allowed.shape[0] * layout.allowed.shape[-1]
    return tokens.new_zeros(size, *tokens.shape[1:]).index_copy(0, layout.places, tokens)


class _Dense(torch.autograd.Function):
    """softmax(query keyᵀ · scale + bias) value, row by row, scores and softmax in float32."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: RowLayout, scale: float
    ) -> torch.Tensor:
        shape = (layout.allowed.shape[0], layout.allowed.shape[-1], key.shape[1], query.shape[1] // key.shape[1])
        q, k, v = (_heads(tensor, layout, shape) for tensor in (query, key, value))
        scores = torch.matmul(q, k.transpose(2, 3)).unflatten(2, (shape[3], shape[1]))  # [R, K, G, W, W]
        scores = torch.add(layout.bias, scores, alpha=scale)
        weights = torch.softmax(scores, -1).to(query.dtype).flatten(2, 3)
        ctx.save_for_backward(q, k, v, weights)
        ctx.layout, ctx.scale, ctx.shape = layout, scale, shape
        return _tokens(torch.matmul(weights, v), layout, shape, query.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        layout, shape = ctx.layout, ctx.shape
        gradient = _heads(gradients[0], layout, shape)
        value_gradient = torch.matmul(weights.transpose(2, 3), gradient)
        scores_gradient = torch.ops.aten._softmax_backward_data(
            torch.matmul(gradient, v.transpose(2, 3)).float(), weights.float(), -1, torch.float32
        )
        scores_gradient = scores_gradient.mul_(ctx.scale).to(q.dtype)
        query_gradient = torch.matmul(scores_gradient, k)
        key_gradient = torch.matmul(scores_gradient.transpose(2, 3), q)
        heads = shape[2] * shape[3]
        return (
            _tokens(query_gradient, layout, shape, heads),
            _tokens(key_gradient, layout, shape, shape[2]),
            _tokens(value_gradient, layout, shape, shape[2]),
            None,
            None,
        )


def _heads(tensor: torch.Tensor, layout: RowLayout, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """[N, H or K, D] into [R, K, G·W or W, D]: query heads of a key head become further rows."""
    rows, width, key_heads, _ = shape
    spread = _spread(tensor, layout).view(rows, width, key_heads, -1, tensor.shape[-1])
    return spread.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _tokens(tensor: torch.Tensor, layout: RowLayout, shape: tuple[int, int, int, int], num_heads: int) -> torch.Tensor:
    """The inverse of ``_heads``."""
    rows, width, key_heads, _ = shape
    apart = tensor.view(rows, key_heads, num_heads // key_heads, width, tensor.shape[-1]).permute(0, 3, 1, 2, 4)
    return apart.reshape(rows * width, num_heads, tensor.shape[-1])[layout.places]
