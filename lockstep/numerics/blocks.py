"""What the block formats share: the record of a quantised tensor, its refusals, and power-of-two scales.

A block is a tile of a tensor with one scale; value ≈ code · scale. e8m0 scales ("ue8m0") are powers of two in one byte:
2^(code − 127), 255 is NaN, there is no zero (OCP Microscaling Formats v1.0, section 5.4.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_E8M0_NAN = 255
_MANTISSA_BITS = 23
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. A scale below it would be flushed to zero on some devices, and e8m0's byte 0 (2^−127)
is read as 0 by decoders that shift the byte into a float's exponent (vLLM's does)."""


class QuantisationError(ValueError):
    """A tensor that can't be quantised or dequantised; the text names it and says what would be right."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """A quantised tensor and the scales of its blocks.

    fp8: ``values`` float8_e4m3fn or float8_e4m3fnuz [..., R, C], ``scale`` [..., ⌈R/128⌉, ⌈C/128⌉] float32 or
    float8_e8m0fnu. mxfp4: ``values`` uint8 [..., C/2], two codes a byte, low nibble first; ``scale`` float8_e8m0fnu
    [..., C/32]. ``bits`` gives either as plain bytes.
    """

    values: torch.Tensor
    scale: torch.Tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of one-byte elements as uint8: many operators and gloo know no float8."""
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def as_float32(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor in float32, which holds bfloat16 and float16 exactly. Raises QuantisationError for any other dtype,
    and for a tensor without elements."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise QuantisationError(f"{name} is {tensor.dtype}; float32, bfloat16 and float16 can be quantised")
    if tensor.numel() == 0:
        raise QuantisationError(f"{name} has shape {tuple(tensor.shape)}: there is nothing to quantise")
    return tensor.detach().to(torch.float32)


def block_maxima(amax: torch.Tensor, largest: float, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``amax`` of the blocks of ``tensor``, with a floor that keeps the scale amax/``largest`` a normal float32: an
    all-zero block gets a scale, and zeros, instead of 0/0.

    The floor is that of DeepSeek-V4's fp4 kernel (6 · 2^−126 there). Larger ones (1e-4 in DeepGEMM) would round a block
    of small weights to zero. Raises QuantisationError if a value is NaN or infinite.
    """
    if not bool(torch.isfinite(amax).all()):
        broken = ~torch.isfinite(tensor)
        first = tuple(broken.nonzero()[0].tolist())
        raise QuantisationError(
            f"{name}: {int(broken.sum())} value(s) are not finite, the first at {first} is {float(tensor[first])}; "
            "a weight that is NaN or infinite has no quantised form"
        )
    return amax.clamp(min=largest * _SMALLEST_SCALE)


def power_of_two_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """float8_e8m0fnu scales: the smallest power of two s with amax ≤ ``largest`` · s, so that nothing saturates.

    2^⌈log2(amax/largest)⌉, as DeepSeek's kernels (``fast_round_scale``), DeepGEMM (``ceil_to_ue8m0``) and torchao's
    RCEIL have it; by the bits of ``amax`` (float32, normal), hence exact and equal on every device.
    """
    mantissa, exponent = math.frexp(largest)  # largest = mantissa · 2^exponent, mantissa in [0.5, 1)
    threshold = int((2 * mantissa - 1) * 2**_MANTISSA_BITS)
    pattern = amax.contiguous().view(torch.int32)
    fraction = pattern & (2**_MANTISSA_BITS - 1)
    codes = (pattern >> _MANTISSA_BITS) - (exponent - 1) + (fraction > threshold).to(torch.int32)
    return codes.to(torch.uint8).view(torch.float8_e8m0fnu)


def e8m0_to_float32(scale: torch.Tensor, name: str) -> torch.Tensor:
    """The powers of two of a float8_e8m0fnu tensor, exactly. Raises QuantisationError for NaN (byte 255)."""
    codes = bits(scale).to(torch.int32)
    if bool((codes == _E8M0_NAN).any()):
        raise QuantisationError(f"{name}: {int((codes == _E8M0_NAN).sum())} block scale(s) are NaN (e8m0 byte 255)")
    subnormal = torch.full_like(codes, 2 ** (_MANTISSA_BITS - 1))  # byte 0 is 2^−127
    return torch.where(codes == 0, subnormal, codes << _MANTISSA_BITS).view(torch.float32)


def usable_scale(scale: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """Block scales in float32, after a look at them. Raises QuantisationError unless they have ``shape`` and are
    positive and finite: what a half-loaded, poisoned or zeroed scale tensor is not."""
    if tuple(scale.shape) != shape:
        raise QuantisationError(f"{name}: its block scales have shape {tuple(scale.shape)}, they must have {shape}")
    if scale.dtype == torch.float8_e8m0fnu:
        return e8m0_to_float32(scale, name)
    if scale.dtype != torch.float32:
        raise QuantisationError(f"{name}: its block scales are {scale.dtype}; float32 or float8_e8m0fnu is right")
    wrong = ~(torch.isfinite(scale) & (scale > 0))
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        raise QuantisationError(
            f"{name}: {int(wrong.sum())} of {scale.numel()} block scales are not positive and finite, "
            f"the first at {first} is {float(scale[first])}"
        )
    return scale
