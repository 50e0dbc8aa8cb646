"""What decoding one new token per sequence does between its matrix products: small C kernels, and the same in torch.

Torch's attention runs one pair of matrix products per sequence and key head. With three queries each those products are
too small to be worth their calls: at 64 sequences of 96 positions they cost more than all linear layers together. And a
norm, a rotation or a gate of 32 rows is less work than the five to eight operators that torch needs for it.
``decode_kernels.c`` reads each value once, and rounds where torch's operators round. It is compiled at the first use
(``native``), tried against torch before it is trusted, and left out if any of that fails; ``backend`` says which it is
and why. It computes in bfloat16; other types take torch's way.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.native import NoKernel, load_kernel

_SOURCE = Path(__file__).with_suffix(".c")
# Sums may be reordered so that they vectorise; numbers are not assumed finite.
_OPTIONS = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "decode_attention": [*[_POINTER] * 4, _LONG, _LONG, _INT, _INT, _INT, _LONG, _FLOAT],
    "add_rms_norm": [*[_POINTER] * 4, _LONG, _LONG, _FLOAT],
    "silu_mul": [_POINTER, _POINTER, _LONG, _LONG],
    "rotate_append": [*[_POINTER] * 5, _LONG, _LONG, _INT, _INT, _INT],
}


@dataclass(frozen=True, slots=True)
class Backend:
    """``kernels`` None: torch's operators, for the reason given. Functions here take one as ``by``; None: what
    ``backend`` found."""

    kernels: Any
    reason: str


@cache
def backend() -> Backend:
    """The kernels, built and tried, or the reason why torch's operators are used instead."""
    try:
        library = load_kernel(_SOURCE, _OPTIONS)
    except NoKernel as error:
        return Backend(None, str(error))
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = ctypes.c_int if name == "decode_attention" else None
    difference = _difference_from_torch(library)
    if not difference < 2e-2:
        return Backend(None, f"the compiled kernels differ from torch's operators by {difference}")
    return Backend(library, f"compiled here, within {difference:.1e} of torch's operators")


def decode_attention(
    queries: torch.Tensor,
    layer_cache: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    by: Backend | None = None,
) -> torch.Tensor:
    """Attended values [n, heads, size] of ``queries`` [n, heads, size] (rows may be strided) over ``layer_cache``
    [rows ≥ n, kv heads, 2, positions, size], row i over its first ``lengths[i]`` positions ([n] int64)."""
    kernels = _kernels_for(queries, queries.shape[2], by)
    if kernels is not None:
        return _attention(kernels, queries, layer_cache, lengths, scaling)
    return _attention_by_torch(queries, layer_cache, lengths, scaling)


def add_rms_norm(
    norm: Any, hidden: torch.Tensor, change: torch.Tensor | None, by: Backend | None = None
) -> torch.Tensor:
    """Add ``change`` to ``hidden`` [n, H] in place and return the model's RMSNorm of it, with its roundings."""
    kernels = _kernels_for(hidden, hidden.shape[1], by)
    if kernels is None or norm.weight.dtype != hidden.dtype:
        return rms_norm(norm, hidden if change is None else hidden.add_(change))
    _must_be_contiguous(hidden, *(() if change is None else (change,)), norm.weight)
    out = torch.empty_like(hidden)
    kernels.add_rms_norm(
        hidden.data_ptr(),
        None if change is None else change.data_ptr(),
        norm.weight.data_ptr(),
        out.data_ptr(),
        *hidden.shape,
        norm.variance_epsilon,
    )
    return out


def silu_mul(gate_up: torch.Tensor, by: Backend | None = None) -> torch.Tensor:
    """silu(gate) · up [n, I] of ``gate_up`` [n, 2 I]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    kernels = _kernels_for(gate_up, size, by)
    if kernels is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    _must_be_contiguous(gate_up)
    out = torch.empty(num_rows, size, dtype=gate_up.dtype)
    kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), num_rows, size)
    return out


def rotate_append(
    qkv: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    layer_cache: torch.Tensor,
    positions: torch.Tensor,
    heads: int,
    by: Backend | None = None,
) -> None:
    """Rotate queries and keys of ``qkv`` [n, heads + 2 kv heads, size] in place, and put rotated keys and values into
    ``layer_cache`` [rows ≥ n, kv heads, 2, capacity, size] at ``positions`` [n] int64. ``rotary``: cosines and sines
    [n, 1, size], the first half of the sines negated: x·cos + (x₂, x₁)·sin."""
    num_rows, _, size = qkv.shape
    _, kv_heads, _, capacity, _ = layer_cache.shape
    cosines, sines = rotary
    kernels = _kernels_for(qkv, size // 2, by)
    if kernels is None:
        rotated = qkv[:, : heads + kv_heads]
        turned = rotated.roll(size // 2, dims=-1).mul_(sines)
        rotated.mul_(cosines).add_(turned)
        appended = qkv[:, heads:].unflatten(1, (2, kv_heads)).transpose(1, 2)  # [n, kv heads, 2, size]
        layer_cache[torch.arange(num_rows), :, :, positions] = appended
        return
    _must_be_contiguous(qkv, cosines, sines, layer_cache, positions)
    pointers = [one.data_ptr() for one in (qkv, cosines, sines, layer_cache, positions)]
    kernels.rotate_append(*pointers, num_rows, capacity, heads, kv_heads, size)


def rms_norm(norm: Any, rows: torch.Tensor) -> torch.Tensor:
    """The model's RMSNorm by torch's operators: normalised in float32, cast, then scaled."""
    normalised = F.rms_norm(rows.float(), rows.shape[-1:], None, norm.variance_epsilon)
    return norm.weight * normalised.to(rows.dtype)


# --- inside -----------------------------------------------------------------------------------------------------------


def _kernels_for(tensor: torch.Tensor, multiple_of_16: int, by: Backend | None) -> Any:
    if tensor.dtype is not torch.bfloat16 or multiple_of_16 % 16:
        return None
    return (by or backend()).kernels


def _must_be_contiguous(*tensors: torch.Tensor) -> None:
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("a decode kernel reads contiguous tensors only")


def _attention_by_torch(
    queries: torch.Tensor, layer_cache: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    num_rows, heads, size = queries.shape
    kv_heads, used = layer_cache.shape[1], int(lengths.max())
    mask = torch.zeros(num_rows, 1, 1, used, dtype=queries.dtype)
    mask.masked_fill_(torch.arange(used) >= lengths[:, None, None, None], float("-inf"))
    keys, values = layer_cache[:num_rows, :, :, :used].unbind(2)
    # Grouped queries as several queries of one key head: keys and values aren't expanded.
    grouped = queries.reshape(num_rows, kv_heads, heads // kv_heads, size)
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return attended.reshape(num_rows, heads, size)


def _attention(
    kernels: Any, queries: torch.Tensor, layer_cache: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    num_rows, heads, size = queries.shape
    _, kv_heads, _, positions, _ = layer_cache.shape
    if queries.stride()[1:] != (size, 1):
        raise ValueError("decode_attention: queries must be contiguous within a row")
    _must_be_contiguous(layer_cache, lengths)
    out = torch.empty(num_rows, heads, size, dtype=queries.dtype)
    pointers = [one.data_ptr() for one in (layer_cache, queries, lengths, out)]
    if kernels.decode_attention(*pointers, num_rows, positions, heads, kv_heads, size, queries.stride(0), scaling):
        raise MemoryError(f"decode_attention: no memory for scores over {positions} positions")
    return out


@torch.no_grad()
def _difference_from_torch(kernels: Any) -> float:
    """The largest difference between the kernels and torch over the steps of a small layer."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, size = 6, 2, 32
    hidden, change = torch.randn(2, 3, 64, generator=generator).bfloat16()
    norm = SimpleNamespace(weight=hidden[0] + 2, variance_epsilon=1e-6)
    qkv = torch.randn(3, heads + 2 * kv_heads, size, generator=generator).bfloat16()
    rotary = torch.randn(2, 3, 1, size, generator=generator).bfloat16()
    cache_ = torch.randn(4, kv_heads, 2, 9, size, generator=generator).bfloat16()
    positions = torch.tensor([0, 8, 3])
    ways = []
    for by in (Backend(kernels, ""), Backend(None, "")):
        state, rows, filled = hidden.clone(), qkv.clone(), cache_.clone()
        normed = add_rms_norm(norm, state, change, by)
        rotate_append(rows, (rotary[0], rotary[1]), filled, positions, heads, by)
        attended = decode_attention(rows[:, :heads], filled, positions + 1, 0.25, by)
        ways.append([state, normed, silu_mul(normed, by), rows, filled, attended])
    return max(float((one - other).abs().max()) for one, other in zip(*ways, strict=True))
