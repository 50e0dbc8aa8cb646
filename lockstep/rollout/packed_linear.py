"""Matrix products for decoding: weights that read the same input fused into one product, pre-packed where that helps.

On a CPU, oneDNN re-lays a bfloat16 weight for its kernels at every call; laid out once ("packed"), the same product of
32 to 64 rows runs up to 1.6 times as fast. The two torch operators for this are private, so ``packing_works`` tries
them against ``F.linear`` first, and without them the plain weights are used one by one. A packed weight is derived
state: it is rebuilt at every refit, and ``unpacked`` undoes the layout so that what is computed with can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
import torch.nn.functional as F

from lockstep.model.head import Float32Head

_ROWS_HINT = 64  # oneDNN chooses the layout for about this many rows


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether packed products of ``dtype`` exist here, equal plain ones and can be undone."""
    if dtype is not torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False  # float32 gains nothing from packing
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    rows = torch.randn(5, 64, generator=generator).to(dtype)
    try:
        packed = _pack(weight)
        product = _packed_product(rows, packed, None)
        undone = packed.to_dense()
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(undone, weight) and torch.allclose(product, F.linear(rows, weight), rtol=2e-2, atol=2e-2)


class FusedLinear:
    """x ↦ the concatenation of x W₁ᵀ + b₁, x W₂ᵀ + b₂, … for weights [out, in] of one module each.

    ``names`` are the weights' state-dict names. The modules are read again at each ``refresh``, so that a weight whose
    storage was replaced is followed.
    """

    def __init__(self, names: Sequence[str], modules: Sequence[torch.nn.Module]) -> None:
        self._names = list(names)
        self._modules = list(modules)
        self._packed: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """Pack the modules' current weights."""
        weights = self._weights()
        biases = [bias for bias in (module.bias for module in self._modules) if isinstance(bias, torch.Tensor)]
        if biases and len(biases) != len(weights):
            raise ValueError(f"some of {self._names} have a bias and some have none")
        self._bias = torch.cat(biases) if biases else None
        if packing_works(weights[0].dtype):
            self._packed = _pack(weights[0] if len(weights) == 1 else torch.cat(weights))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, in] ↦ [n, sum of outs]."""
        if self._packed is not None:
            return _packed_product(rows, self._packed, self._bias)
        products = [module(rows) for module in self._modules]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def unpacked(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, weight) out of the packed layout; nothing where the modules' own weights are computed with."""
        if self._packed is None:
            return
        sizes = [weight.shape[0] for weight in self._weights()]
        yield from zip(self._names, self._packed.to_dense().split(sizes), strict=True)

    def _weights(self) -> list[torch.Tensor]:
        return [module.weight.detach() for module in self._modules]  # pyright: ignore[reportCallIssue]


class Float32Linear:
    """A ``Float32Head`` as decoding runs it: its weight widened once, at each ``refresh``, and not at every call."""

    def __init__(self, name: str, head: Float32Head) -> None:
        self._name = name
        self._head = head
        self._weight = head.weight.detach().float()

    def refresh(self) -> None:
        """Widen the current weight."""
        self._weight = self._head.weight.detach().float()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, in] ↦ [n, out] float32."""
        bias = None if self._head.bias is None else self._head.bias.float()
        return F.linear(rows.float(), self._weight, bias)

    def unpacked(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, weight) as it is computed with, in the head's own dtype, which holds it exactly."""
        yield self._name, self._weight.to(self._head.weight.dtype)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)


def _packed_product(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
