"""A block-fp8 product in plain torch, for CPUs that vLLM has none for (its own needs AMX).

Everything before the product is vLLM's: the layers' parameters, the loaders, the layer-wise reload, and the
post-processing that re-lays a weight and its scales. Here that is a transpose, and scales padded to whole tiles of 4,
so that both have another shape live than in the checkpoint, as kernels do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

TILE = 4


class TorchBlockKernel(Fp8BlockScaledMMLinearKernel):
    """y = x dequantised(W)ᵀ, the weight kept as [in, out] codes, its scales padded with ones."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        replace_parameter(layer, "weight", layer.weight.data.t().contiguous())  # pyright: ignore
        scale = layer.weight_scale_inv.data
        rows, columns = (-size % TILE for size in scale.shape)
        replace_parameter(layer, "weight_scale_inv", F.pad(scale, (0, columns, 0, rows), value=1.0))

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        codes = layer.weight.t().float()
        scale = layer.weight_scale_inv.repeat_interleave(128, 0)[: codes.shape[0]]
        scale = scale.repeat_interleave(128, 1)[:, : codes.shape[1]]
        return F.linear(x, (codes * scale).to(x.dtype), bias)

    def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
        raise AssertionError("apply_weights does not come here")


@contextmanager
def torch_block_kernel() -> Iterator[None]:
    """Inside, an engine that starts takes this kernel for block-fp8 linear layers."""
    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS
    before = kernels[PlatformEnum.CPU]
    kernels[PlatformEnum.CPU] = [TorchBlockKernel]
    try:
        yield
    finally:
        kernels[PlatformEnum.CPU] = before
