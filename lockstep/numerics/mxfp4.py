"""mxfp4: e2m1 codes in blocks of 1 × 32 along the last dimension, with an e8m0 scale a block.

e2m1 has the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; codes 0 to 7 are they, 8 to 15 the negatives. Two
codes make a byte, the low nibble first. Rounding is to the nearest, ties to the even code, as torchao's cast has it.
OCP Microscaling Formats v1.0 (2023), section 5.3.3.

The specification leaves the scale to the implementation beyond a minimum (2^⌊log2 amax⌋ / 4, which cuts what lies
above 6 · scale). Here it is DeepSeek-V4's and torchao's RCEIL: the smallest power of two with amax ≤ 6 · scale, so that
nothing saturates. Blocks have exactly 32 elements in the specification, in torchao and in DeepSeek-V4's kernels: a last
dimension that is no multiple of 32 is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lockstep.numerics.blocks import (
    QuantisationError,
    Quantised,
    as_float32,
    block_maxima,
    e8m0_to_float32,
    power_of_two_scale,
    usable_scale,
)

BLOCK = 32
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between neighbouring values; a tie goes to the even code: up at every second one."""
_CHUNK_ELEMENTS = 2**22
"""Elements that are in float32 at a time."""


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the packed codes of a tensor of ``shape``. Raises QuantisationError if its last dimension has no whole
    blocks."""
    if not shape or 0 in shape or shape[-1] % BLOCK:
        raise QuantisationError(
            f"shape {shape}: mxfp4 has blocks of {BLOCK} along the last dimension, which must be a multiple of {BLOCK}"
        )
    return (*shape[:-1], shape[-1] // 2)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the block scales of a tensor of (unpacked) ``shape``."""
    packed_shape(shape)
    return (*shape[:-1], shape[-1] // BLOCK)


def quantise_mxfp4(tensor: torch.Tensor, name: str = "tensor") -> Quantised:
    """``tensor`` [..., C] (float32, bfloat16, float16) as packed codes uint8 [..., C/2] and scales float8_e8m0fnu
    [..., C/32].

    Raises QuantisationError, with ``name``, for NaN, infinity, another dtype, or a C that is no multiple of 32.
    """
    try:
        packed, scales = packed_shape(tuple(tensor.shape)), scale_shape(tuple(tensor.shape))
    except QuantisationError as error:
        raise QuantisationError(f"{name}: {error}") from None
    values: list[torch.Tensor] = []
    scale: list[torch.Tensor] = []
    for rows in _chunks(tensor.reshape(-1, tensor.shape[-1]), tensor.shape[-1]):
        wide = as_float32(rows, name).contiguous()
        blocks = wide.view(len(wide), -1, BLOCK)
        codes = power_of_two_scale(block_maxima(blocks.abs().amax(-1), E2M1_MAX, wide, name), E2M1_MAX)
        scaled = blocks / e8m0_to_float32(codes, name)[..., None]
        values.append(_pack(_codes(scaled).view(len(wide), -1)))
        scale.append(codes.view(torch.uint8))
    return Quantised(torch.cat(values).view(packed), torch.cat(scale).view(scales).view(torch.float8_e8m0fnu))


def dequantise_mxfp4(quantised: Quantised, dtype: torch.dtype = torch.float32, name: str = "tensor") -> torch.Tensor:
    """code · scale, exact in float32, rounded once to ``dtype``. Raises QuantisationError if codes and scales don't
    belong together or a scale is NaN."""
    values = quantised.values
    if values.dtype != torch.uint8:
        raise QuantisationError(f"{name} is {values.dtype}; packed mxfp4 codes are uint8")
    shape = (*values.shape[:-1], 2 * values.shape[-1])
    if quantised.scale.dtype != torch.float8_e8m0fnu:
        raise QuantisationError(f"{name}: its block scales are {quantised.scale.dtype}; mxfp4's are float8_e8m0fnu")
    scale = usable_scale(quantised.scale, scale_shape(shape), name).reshape(-1, shape[-1] // BLOCK)
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=values.device)
    result = torch.empty((len(scale), shape[-1]), dtype=dtype, device=values.device)
    width = values.shape[-1]
    rows = values.reshape(-1, width)
    for codes, own, target in zip(_chunks(rows, width), _chunks(scale, width), _chunks(result, width), strict=True):
        numbers = table[_unpack(codes).to(torch.int64)].view(len(codes), -1, BLOCK)
        target.copy_((numbers * own[..., None]).view(len(codes), -1))
    return result.view(shape)


def _chunks(rows: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    """``rows`` [N, ...] in pieces of as many rows as ``_CHUNK_ELEMENTS`` of ``width`` elements allow."""
    yield from rows.split(max(1, _CHUNK_ELEMENTS // width))


def _codes(scaled: torch.Tensor) -> torch.Tensor:
    """e2m1 codes (uint8, 0 to 15) of values of at most 6 in magnitude; the sign of a zero is kept."""
    magnitude = scaled.abs()
    codes = torch.signbit(scaled).to(torch.uint8) << 3
    for index, boundary in enumerate(_BOUNDARIES):
        # Between codes i and i+1: a tie goes up where i is odd.
        codes += (magnitude >= boundary if index % 2 else magnitude > boundary).to(torch.uint8)
    return codes


def _pack(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)
