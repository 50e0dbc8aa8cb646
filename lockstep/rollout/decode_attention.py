"""Attention of one new token per sequence over the slot cache: a small C kernel, or torch's where there is none.

Torch's attention runs one pair of matrix products per sequence and key head. With three queries each those products are
too small to be worth their calls: at 64 sequences of 96 positions they cost more than all linear layers together.
``decode_attention.c`` reads each key and value once. It is compiled at the first use (``native``), tried against torch
before it is trusted, and left out if any of that fails; ``backend`` says which it is and why.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.native import NoKernel, load_kernel

_SOURCE = Path(__file__).with_suffix(".c")
# Sums may be reordered so that they vectorise; numbers are not assumed finite.
_OPTIONS = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")


@dataclass(frozen=True, slots=True)
class Backend:
    """``kernel`` None: torch's attention, for the reason given."""

    kernel: Any
    reason: str


@cache
def backend() -> Backend:
    """The kernel, built and tried, or the reason why torch's attention is used instead."""
    try:
        kernel = load_kernel(_SOURCE, _OPTIONS).decode_attention
    except NoKernel as error:
        return Backend(None, str(error))
    kernel.restype = ctypes.c_int
    difference = _difference_from_torch(kernel)
    if not difference < 2e-2:
        return Backend(None, f"the compiled kernel differs from torch's attention by {difference}")
    return Backend(kernel, f"compiled here, within {difference:.1e} of torch's attention")


def decode_attention(queries: torch.Tensor, layer_cache: torch.Tensor, lengths: torch.Tensor, scaling: float):
    """Attended values [n, heads, size] of ``queries`` [n, heads, size] (rows may be strided) over ``layer_cache``
    [rows ≥ n, kv heads, 2, positions, size], row i over its first ``lengths[i]`` positions ([n] int64)."""
    if queries.dtype is torch.bfloat16 and queries.shape[2] % 16 == 0 and (kernel := backend().kernel) is not None:
        return _by_kernel(kernel, queries, layer_cache, lengths, scaling)
    return _by_torch(queries, layer_cache, lengths, scaling)


def _by_torch(queries: torch.Tensor, layer_cache: torch.Tensor, lengths: torch.Tensor, scaling: float) -> torch.Tensor:
    num_rows, heads, size = queries.shape
    kv_heads, used = layer_cache.shape[1], int(lengths.max())
    mask = torch.zeros(num_rows, 1, 1, used, dtype=queries.dtype)
    mask.masked_fill_(torch.arange(used) >= lengths[:, None, None, None], float("-inf"))
    keys, values = layer_cache[:num_rows, :, :, :used].unbind(2)
    # Grouped queries as several queries of one key head: keys and values aren't expanded.
    grouped = queries.reshape(num_rows, kv_heads, heads // kv_heads, size)
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return attended.reshape(num_rows, heads, size)


def _by_kernel(
    kernel: Any, queries: torch.Tensor, layer_cache: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    num_rows, heads, size = queries.shape
    _, kv_heads, _, positions, _ = layer_cache.shape
    if not layer_cache.is_contiguous() or queries.stride()[1:] != (size, 1) or not lengths.is_contiguous():
        raise ValueError("decode_attention: cache and lengths must be contiguous, and queries within a row")
    out = torch.empty(num_rows, heads, size, dtype=queries.dtype)
    failed = kernel(
        ctypes.c_void_p(layer_cache.data_ptr()),
        ctypes.c_void_p(queries.data_ptr()),
        ctypes.c_void_p(lengths.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_long(num_rows),
        ctypes.c_long(positions),
        ctypes.c_int(heads),
        ctypes.c_int(kv_heads),
        ctypes.c_int(size),
        ctypes.c_long(queries.stride(0)),
        ctypes.c_float(scaling),
    )
    if failed:
        raise MemoryError(f"decode_attention: no memory for scores over {positions} positions")
    return out


def _difference_from_torch(kernel: Any) -> float:
    generator = torch.Generator().manual_seed(0)
    cache_ = torch.randn(4, 2, 2, 9, 16, generator=generator).bfloat16()
    queries = torch.randn(3, 6, 16, generator=generator).bfloat16()
    lengths = torch.tensor([1, 9, 4])
    return float(
        (_by_kernel(kernel, queries, cache_, lengths, 0.25) - _by_torch(queries, cache_, lengths, 0.25)).abs().max()
    )
