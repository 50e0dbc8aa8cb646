"""fp8 in blocks of 128 × 128: e4m3fn codes with a scale a block, as DeepSeek-V3's checkpoints have them.

``scale = amax / 448`` in float32 (a checkpoint's ``weight_scale_inv``), or the next power of two above it ("ue8m0").
codes = round(x / scale), ties to even. Blocks lie over the last two dimensions; leading ones (experts) are apart. The
last block of a row or column may be smaller: it is a block like any other. DeepSeek-AI, "DeepSeek-V3 Technical Report"
(2024), section 3.3; ``act_quant`` and ``weight_dequant`` of its published inference code.

e4m3fn: exponent bias 7, largest 448, 0x7f and 0xff are NaN. e4m3fnuz (MI300): bias 8, largest 240, no negative zero,
0x80 is NaN: the same bits mean half the value.

Quantising is deterministic: division, rounding and powers of two are those of IEEE float32, nothing depends on order.
Quantising what was dequantised gives the same again, with two exceptions in the scale. Power-of-two scales: where a
block's largest value was rounded down to half of the range, the scale halves and the codes double, which is the same
weights. float32 scales: 448 · scale can round so that its 448th part is one unit in the last place off; the codes stay,
and from then on the scale does too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F

from lockstep.numerics.blocks import (
    QuantisationError,
    Quantised,
    as_float32,
    bits,
    block_maxima,
    e8m0_to_float32,
    power_of_two_scale,
    usable_scale,
)

BLOCK = 128
E4M3FN_MAX = 448.0
E4M3FNUZ_MAX = 240.0
ScaleFormat = Literal["float32", "ue8m0"]

_STRIP_ELEMENTS = 2**19
_PIECE_ELEMENTS = 2**17
_MOVED = 2.0**120
_KEPT_BITS = 0x87F0 - 0x10000  # as int16: the sign, four bits of exponent, three of mantissa
_NEGATIVE_ZERO = 0x80
_MAGNITUDE = 0x7F


def scale_shape(shape: tuple[int, ...], row_parts: int = 1) -> tuple[int, ...]:
    """Shape of the block scales of a tensor of ``shape`` [..., R, C]. Raises QuantisationError if it has no blocks.

    ``row_parts``: R is that many equal parts, each with blocks of its own (gate and up in one stack), so that the parts
    get the same codes together as apart.
    """
    if len(shape) < 2 or 0 in shape:
        raise QuantisationError(f"shape {shape} has no blocks: at least two dimensions with elements are needed")
    if shape[-2] % row_parts:
        raise QuantisationError(f"shape {shape}: {shape[-2]} rows are not {row_parts} equal parts")
    return (*shape[:-2], row_parts * _num_blocks(shape[-2] // row_parts), _num_blocks(shape[-1]))


def quantise_fp8(
    tensor: torch.Tensor, scale_format: ScaleFormat = "float32", *, row_parts: int = 1, name: str = "tensor"
) -> Quantised:
    """``tensor`` [..., R, C] (float32, bfloat16, float16) as float8_e4m3fn with float32 or float8_e8m0fnu scales.

    Raises QuantisationError, with ``name``, for NaN, infinity, another dtype, or fewer than two dimensions.
    """
    return _quantise(tensor, E4M3FN_MAX, torch.float8_e4m3fn, scale_format, row_parts, name)


def quantise_fp8_fnuz(
    tensor: torch.Tensor, scale_format: ScaleFormat = "float32", *, row_parts: int = 1, name: str = "tensor"
) -> Quantised:
    """The same as float8_e4m3fnuz, whose largest value is 240."""
    return _quantise(tensor, E4M3FNUZ_MAX, torch.float8_e4m3fnuz, scale_format, row_parts, name)


def dequantise_fp8(
    quantised: Quantised, dtype: torch.dtype = torch.float32, *, row_parts: int = 1, name: str = "tensor"
) -> torch.Tensor:
    """code · scale in float32, rounded once to ``dtype``. Raises QuantisationError for scales of another shape, scales
    that are not positive and finite, and codes that are NaN."""
    values = quantised.values
    refuse_nan_codes(values, name)
    shape = tuple(values.shape)
    scale = usable_scale(quantised.scale, scale_shape(shape, row_parts), name)
    matrices = values.reshape(-1, shape[-2] // row_parts, shape[-1])
    scales = scale.reshape(len(matrices), -1, scale.shape[-1])
    result = torch.empty(matrices.shape, dtype=dtype, device=values.device)
    by_bits = _may_move_bits(values, scales)
    for matrix, own, target in zip(matrices, scales, result, strict=True):
        factors = own * _MOVED if by_bits else own
        spread = factors.repeat_interleave(BLOCK, 1)[:, : shape[-1]]
        for rows in _pieces_of_blocks(len(matrix), shape[-1]):
            numbers = _moved_bits(matrix[rows]) if by_bits else matrix[rows].to(torch.float32)
            target[rows].copy_(numbers.mul_(spread[rows.start // BLOCK]))
    return result.view(shape)


def e4m3fn_to_e4m3fnuz(quantised: Quantised, name: str = "tensor") -> Quantised:
    """The same values in e4m3fnuz: the same bits, which mean half there, with twice the scale; −0 becomes 0."""
    _refuse_other_dtype(quantised.values, torch.float8_e4m3fn, name)
    refuse_nan_codes(quantised.values, name)
    codes = bits(quantised.values)
    codes = torch.where(codes == _NEGATIVE_ZERO, 0, codes).to(torch.uint8)
    return Quantised(codes.view(torch.float8_e4m3fnuz), _times(quantised.scale, 1, name))


def e4m3fnuz_to_e4m3fn(quantised: Quantised, name: str = "tensor") -> Quantised:
    """The same values in e4m3fn: the same bits with half the scale.

    Raises QuantisationError for ±240 (bits 0x7f and 0xff, NaN in e4m3fn): a tensor that was quantised for e4m3fnuz has
    one in every block, and has to be dequantised and quantised anew.
    """
    _refuse_other_dtype(quantised.values, torch.float8_e4m3fnuz, name)
    refuse_nan_codes(quantised.values, name)
    codes = bits(quantised.values)
    largest = int(((codes & _MAGNITUDE) == _MAGNITUDE).sum())
    if largest:
        raise QuantisationError(
            f"{name}: {largest} code(s) are ±240, whose bits are NaN in e4m3fn; dequantise and quantise anew"
        )
    return Quantised(codes.view(torch.float8_e4m3fn), _times(quantised.scale, -1, name))


def refuse_nan_codes(values: torch.Tensor, name: str) -> None:
    """Raise QuantisationError if fp8 codes hold NaN, or are no fp8 at all."""
    if values.dtype not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        raise QuantisationError(f"{name} is {values.dtype}; float8_e4m3fn or float8_e4m3fnuz is right")
    flat = bits(values).reshape(-1)
    pieces = flat.split(_PIECE_ELEMENTS) if values.device.type == "cpu" else (flat,)
    if any(bool(_are_nan(piece, values.dtype).any()) for piece in pieces):
        count = int(_are_nan(flat, values.dtype).sum())
        raise QuantisationError(f"{name}: {count} of {values.numel()} codes are NaN")


def _are_nan(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Which bytes are NaN in an fp8 dtype."""
    return (codes & _MAGNITUDE) == _MAGNITUDE if dtype == torch.float8_e4m3fn else codes == _NEGATIVE_ZERO


def _quantise(
    tensor: torch.Tensor, largest: float, dtype: torch.dtype, scale_format: ScaleFormat, row_parts: int, name: str
) -> Quantised:
    try:
        scales = scale_shape(tuple(tensor.shape), row_parts)
    except QuantisationError as error:
        raise QuantisationError(f"{name}: {error}") from None
    scale_dtype = torch.float8_e8m0fnu if scale_format == "ue8m0" else torch.float32
    matrices = tensor.detach().reshape(-1, tensor.shape[-2] // row_parts, tensor.shape[-1])
    values = torch.empty(matrices.shape, dtype=torch.uint8, device=tensor.device)
    scale = torch.empty(
        (len(matrices), _num_blocks(matrices.shape[1]), _num_blocks(matrices.shape[2])),
        dtype=torch.uint8 if scale_format == "ue8m0" else torch.float32,
        device=tensor.device,
    )
    for matrix, codes, own in zip(matrices, values, scale, strict=True):
        for rows in _strips(*matrix.shape):
            part = _quantise_strip(matrix, rows, largest, dtype, scale_dtype, name)
            codes[rows] = bits(part.values)
            own[rows.start // BLOCK : _num_blocks(rows.stop)] = (
                bits(part.scale) if scale_format == "ue8m0" else part.scale
            )
    return Quantised(values.view(dtype).view(tensor.shape), scale.view(scale_dtype).view(scales))


def _strips(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Whole rows of blocks at a time: what float32 needs of a strip stays in a core's cache (a whole 4096 × 4096 matrix
    took five times as long on a CPU), and memory stays at the source and its result."""
    step = BLOCK * max(1, _STRIP_ELEMENTS // (BLOCK * num_columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _quantise_strip(
    matrix: torch.Tensor, rows: slice, largest: float, dtype: torch.dtype, scale_dtype: torch.dtype, name: str
) -> Quantised:
    strip = as_float32(matrix[rows], name)
    height, width = strip.shape
    if height % BLOCK or width % BLOCK:
        strip = F.pad(strip, (0, -width % BLOCK, 0, -height % BLOCK))  # zeros change no amax
    blocks = strip.contiguous().view(strip.shape[0] // BLOCK, BLOCK, strip.shape[1] // BLOCK, BLOCK)
    amax = block_maxima(blocks.abs().amax(dim=(1, 3)), largest, matrix, name)
    scale = power_of_two_scale(amax, largest) if scale_dtype != torch.float32 else amax / largest
    factors = scale if scale_dtype == torch.float32 else e8m0_to_float32(scale, name)
    # The clamp is for amax/scale one rounding above the largest: a cast without saturation would make it NaN.
    scaled = (blocks / factors[:, None, :, None]).clamp_(-largest, largest)
    return Quantised(scaled.view(strip.shape)[:height, :width].to(dtype), scale)


def _pieces_of_blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """A few rows of one row of blocks at a time, so that they stay in a core's cache."""
    step = min(BLOCK, max(1, _PIECE_ELEMENTS // num_columns))
    for block in range(0, num_rows, BLOCK):
        end = min(block + BLOCK, num_rows)
        for start in range(block, end, step):
            yield slice(start, min(start + step, end))


def _may_move_bits(values: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether ``_moved_bits`` and scales · 2^120 are exact: not in a thread that flushes subnormal numbers to zero
    (``torch.set_flush_denormal``), and not for scales that would leave float32."""
    if values.dtype != torch.float8_e4m3fn or values.device.type != "cpu":
        return False
    return float(torch.full((1,), 2.0**-130) * _MOVED) != 0 and float(scale.max()) < 2.0**7


def _moved_bits(codes: torch.Tensor) -> torch.Tensor:
    """e4m3fn codes · 2^−120 as float32: their bits, put where bfloat16 has sign, exponent and mantissa. On a CPU, torch
    2.13 converts e4m3fn one element at a time, at a quarter of this speed. Subnormal codes are subnormal there too."""
    patterns = codes.view(torch.int8).to(torch.int16)  # the sign is spread over the upper byte
    return patterns.bitwise_left_shift_(4).bitwise_and_(_KEPT_BITS).view(torch.bfloat16).to(torch.float32)


def _times(scale: torch.Tensor, exponent: int, name: str) -> torch.Tensor:
    """``scale`` · 2^``exponent`` in its own format, exactly."""
    if scale.dtype == torch.float32:
        result = scale * 2.0**exponent
        if not bool(torch.isfinite(result).all()) or not bool((result / 2.0**exponent == scale).all()):
            raise QuantisationError(f"{name}: a block scale leaves float32 when it is multiplied by {2.0**exponent:g}")
        return result
    codes = bits(scale).to(torch.int32) + exponent
    if bool(((codes < 0) | (codes > 254)).any()):
        raise QuantisationError(f"{name}: a block scale leaves e8m0 when it is multiplied by {2.0**exponent:g}")
    return codes.to(torch.uint8).view(torch.float8_e8m0fnu)


def _refuse_other_dtype(values: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    if values.dtype != dtype:
        raise QuantisationError(f"{name} is {values.dtype}, expected {dtype}")


def _num_blocks(length: int) -> int:
    return -(-length // BLOCK)
