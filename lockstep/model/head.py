"""The output head's precision: one setting for trainer and engine.

In bfloat16 the head's product is rounded to eight bits of mantissa before the softmax, on each side in its own order:
noise in every log-prob (sgl-project/sglang#10490). ``Float32Head`` multiplies the same weights in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


class Float32Head(torch.nn.Linear):
    """A linear layer that computes in float32 whatever the dtype of its weights, which stay as they are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [.., V] float32 of states [.., H]."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


def use_float32_head(model: Any) -> None:
    """Make ``model.lm_head`` compute in float32, in place: names, storage and ties of its weight stay.

    Raises TypeError for a head that isn't a plain linear layer.
    """
    if not takes_float32_head(model):
        kind = type(model.lm_head).__name__ if hasattr(model, "lm_head") else "none of that name"
        raise TypeError(f"head_dtype float32 needs a plain linear layer as lm_head; {type(model).__name__} has {kind}")
    model.lm_head.__class__ = Float32Head


def takes_float32_head(model: Any) -> bool:
    """Whether ``use_float32_head`` can do that: the head is a plain linear layer."""
    return type(getattr(model, "lm_head", None)) in (torch.nn.Linear, Float32Head)
