"""fp8 in blocks against its definition: every code, every tie, tails, zeros, and what must be refused.

The reference decodes the 256 codes by their bit fields in float64 and rounds by looking for the nearest of them, so it
shares nothing with torch's casts. transformers (power-of-two scales) and torchao (float32 scales) agree bit for bit.
"""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.numerics.blocks import QuantisationError, Quantised, bits, e8m0_to_float32
from lockstep.numerics.fp8 import (
    BLOCK,
    dequantise_fp8,
    e4m3fn_to_e4m3fnuz,
    e4m3fnuz_to_e4m3fn,
    quantise_fp8,
    quantise_fp8_fnuz,
    scale_shape,
)
from tests.unit import torchao_vectors

FORMATS = ("float32", "ue8m0")


def decoded(code: int, bias: int) -> float:
    """The value of an e4m3 code by its fields, without the codes that are NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
    return -magnitude if sign else magnitude


FN = np.array([np.nan if code & 0x7F == 0x7F else decoded(code, 7) for code in range(256)])
FNUZ = np.array([np.nan if code == 0x80 else decoded(code, 8) for code in range(256)])


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of the nearest values of ``table``; ties to the even code; the sign of a zero is the value's."""
    half = table[:128][~np.isnan(table[:128])]
    distance = np.abs(np.abs(values)[..., None] - half)
    best = distance.min(-1, keepdims=True)
    codes = np.arange(len(half))
    code = np.where(distance == best, codes, 1000)
    even = np.where((distance == best) & (codes % 2 == 0), codes, 1000).min(-1)
    code = np.where((distance == best).sum(-1) == 2, even, code.min(-1))
    return code | (np.signbit(values).astype(np.int64) << 7)


def reference(x: np.ndarray, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales as float64) of a float32 matrix, block by block, by the definition."""
    rows, columns = -(-x.shape[0] // BLOCK), -(-x.shape[1] // BLOCK)
    codes, scales = np.zeros(x.shape, np.int64), np.zeros((rows, columns))
    for i in range(rows):
        for j in range(columns):
            where = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            amax = np.float32(max(np.abs(x[where]).max(), np.float32(448 * 2.0**-126)))
            scale = np.float32(amax / np.float32(448))
            if scale_format == "ue8m0":
                exponent = -126
                while Fraction(float(amax)) > 448 * Fraction(2) ** exponent:
                    exponent += 1
                scale = np.float32(2.0**exponent)
            scaled = (x[where] / scale).astype(np.float32).astype(np.float64)
            codes[where], scales[i, j] = nearest(np.clip(scaled, -448, 448), FN), scale
    return codes, scales


def matrix(rows: int, columns: int, seed: int = 0, spread: float = 6.0) -> torch.Tensor:
    """Values over many magnitudes, some of them zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values *= torch.exp2(torch.randint(-int(spread), 3, values.shape, generator=generator).float() * 2)
    values.view(-1)[::17] = 0.0
    values.view(-1)[::19] = -0.0
    return values


def factors(quantised: Quantised) -> np.ndarray:
    scale = quantised.scale
    return (e8m0_to_float32(scale, "x") if scale.dtype == torch.float8_e8m0fnu else scale).numpy().astype(np.float64)


@pytest.mark.parametrize(("dtype", "table", "nan"), [("e4m3fn", FN, {0x7F, 0xFF}), ("e4m3fnuz", FNUZ, {0x80})])
def test_every_code_means_what_its_bits_say(dtype: str, table: np.ndarray, nan: set[int]) -> None:
    codes = [code for code in range(256) if code not in nan]
    values = torch.tensor(codes, dtype=torch.uint8).view(getattr(torch, f"float8_{dtype}"))[None]
    ours = dequantise_fp8(Quantised(values, torch.ones(1, 2)))
    np.testing.assert_array_equal(ours[0].numpy().astype(np.float64), table[codes])
    assert [bool(b) for b in torch.signbit(ours[0])] == [bool(np.signbit(table[code])) for code in codes]
    for code in nan:
        broken = torch.full((1, 1), code, dtype=torch.uint8).view(values.dtype)
        with pytest.raises(QuantisationError, match="w: 1 of 1 codes are NaN"):
            dequantise_fp8(Quantised(broken, torch.ones(1, 1)), name="w")


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 257), (5, 300), (256, 127)])
def test_codes_and_scales_are_those_of_the_definition(shape: tuple[int, int], scale_format: Any) -> None:
    x = matrix(*shape)
    ours = quantise_fp8(x, scale_format)
    codes, scales = reference(x.numpy(), scale_format)
    np.testing.assert_array_equal(bits(ours.values).numpy(), codes)
    np.testing.assert_array_equal(factors(ours), scales)
    assert ours.scale.shape == scale_shape(shape)
    assert ours.scale.dtype == (torch.float32 if scale_format == "float32" else torch.float8_e8m0fnu)


def test_every_tie_goes_to_the_even_code_and_every_neighbour_to_the_nearer() -> None:
    finite = np.sort(FN[~np.isnan(FN)])
    middles = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    around = np.concatenate([middles, np.nextafter(middles, np.float32(1e9)), np.nextafter(middles, np.float32(-1e9))])
    x = np.concatenate([[448.0], around[np.abs(around) <= 448]]).astype(np.float32)
    rows = [np.concatenate([[448.0], part]) for part in np.array_split(x, 10)]
    for row in rows:
        ours = quantise_fp8(torch.from_numpy(row.astype(np.float32))[None], "ue8m0")
        assert float(factors(ours)[0, 0]) == 1.0
        np.testing.assert_array_equal(bits(ours.values)[0].numpy(), nearest(row, FN))


def test_power_of_two_scales_round_up_and_exactly_so() -> None:
    for exponent in (-100, -3, 0, 7, 119):
        border = np.float32(448 * 2.0**exponent)
        for amax, expected in ((border, exponent), (np.nextafter(border, np.float32(np.inf)), exponent + 1)):
            ours = quantise_fp8(torch.tensor([[float(amax)]]), "ue8m0")
            assert int(bits(ours.scale)) - 127 == expected
            assert float(dequantise_fp8(ours)) <= float(amax)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_transformers_quantises_and_dequantises_to_the_same_weights(scale_format: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(weight_block_size=(BLOCK, BLOCK), scale_fmt=None if scale_format == "float32" else "ue8m0")
    quantizer = SimpleNamespace(quantization_config=config)
    x = matrix(3 * BLOCK, 2 * BLOCK, seed=3)
    theirs = Fp8Quantize(quantizer)._quantize_one("a.weight", x)
    ours = quantise_fp8(x, scale_format)  # pyright: ignore[reportArgumentType]
    if scale_format == "ue8m0":
        assert torch.equal(bits(theirs["a.weight"]), bits(ours.values))
        assert torch.equal(bits(theirs["a.weight_scale_inv"]), bits(ours.scale))
    else:  # they store 1 / (448 / amax) and multiply by 448 / amax, each a rounding away from the quotient
        np.testing.assert_allclose(theirs["a.weight_scale_inv"].numpy(), ours.scale.numpy(), rtol=2**-22)
    theirs_back = Fp8Dequantize(quantizer)._dequantize_one(ours.values, ours.scale, output_dtype=torch.float32)
    assert torch.equal(theirs_back, dequantise_fp8(ours))


@pytest.mark.parametrize("dtype", torchao_vectors.DTYPES)
@pytest.mark.parametrize("seed", torchao_vectors.SEEDS)
def test_torchao_has_quantised_the_same_weights_to_the_same_bytes(seed: int, dtype: str) -> None:
    ours = quantise_fp8(torchao_vectors.values(seed, dtype))
    digest = torchao_vectors.digest(ours.values, ours.scale, dequantise_fp8(ours))
    assert digest == torchao_vectors.TORCHAO[f"fp8 {dtype} {seed}"]
    ours.values.view(torch.uint8)[0, 0] ^= 1
    assert digest != torchao_vectors.digest(ours.values, ours.scale, dequantise_fp8(ours))


@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    magnitude=st.floats(-40, 35),
    scale_format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=60, deadline=None)
def test_the_error_is_half_a_step_and_a_second_pass_changes_nothing(
    rows: int, columns: int, seed: int, magnitude: float, scale_format: Any, dtype: torch.dtype
) -> None:
    if dtype == torch.float16:
        magnitude = max(-10.0, min(magnitude, 3.0))
    x = (matrix(rows, columns, seed) * 10.0**magnitude).to(dtype)
    x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    first = quantise_fp8(x, scale_format)
    again = quantise_fp8(x.clone(), scale_format)
    assert torch.equal(bits(first.values), bits(again.values))
    assert np.array_equal(factors(first), factors(again))
    back = dequantise_fp8(first).double()
    spread = (
        torch.from_numpy(factors(first)).repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    )
    # Half a step: 2^-4 of the value, 2^-10 of the scale below the smallest normal; the rest is float32's own rounding.
    allowed = torch.maximum(x.double().abs() * 2**-4, spread * 2**-10) * (1 + 1e-6) + 2.0**-149
    assert bool(((back - x.double()).abs() <= allowed).all())
    second = quantise_fp8(dequantise_fp8(first), scale_format)
    third = quantise_fp8(dequantise_fp8(second), scale_format)
    assert torch.equal(bits(second.values), bits(third.values))
    assert np.array_equal(factors(second), factors(third))
    if scale_format == "ue8m0":
        assert torch.equal(dequantise_fp8(second).view(torch.int32), dequantise_fp8(first).view(torch.int32))
    else:
        assert torch.equal(bits(second.values), bits(first.values))
        np.testing.assert_allclose(factors(second), factors(first), rtol=2**-23)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_blocks_of_zeros_and_of_the_smallest_numbers_stay_finite(scale_format: Any) -> None:
    x = torch.zeros(2 * BLOCK, BLOCK + 3)
    x[0, 0], x[1, 1] = -0.0, -0.0
    x[BLOCK:, :BLOCK] = 1e-45  # the smallest subnormal of float32
    ours = quantise_fp8(x, scale_format)
    assert float(factors(ours).min()) == 2.0**-126
    assert not bits(ours.values)[2:].any()
    assert int(bits(ours.values)[0, 0]) == 0x80, "the sign of a zero is kept"
    back = dequantise_fp8(ours)
    assert bool((back == 0).all())
    assert bool(torch.signbit(back)[0, 0])


def test_the_largest_numbers_do_not_overflow() -> None:
    largest = 2.0**127  # above that, the next code can lie beyond float32, as the next bfloat16 does
    for scale_format in FORMATS:
        ours = quantise_fp8(torch.tensor([[largest, -largest, 1.0]]), scale_format)  # pyright: ignore[reportArgumentType]
        back = dequantise_fp8(ours)
        assert bool(torch.isfinite(back).all())
        assert float(back[0, 0]) == -float(back[0, 1])
        assert float(back[0, 0]) >= largest * (1 - 2**-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_refused_by_name_and_place(value: float, dtype: torch.dtype) -> None:
    x = torch.zeros(130, 4, dtype=dtype)
    x[129, 2] = value
    with pytest.raises(QuantisationError, match=r"layers\.3\.w: 1 value\(s\) are not finite, the first at \(129, 2\)"):
        quantise_fp8(x, name="layers.3.w")


def test_other_dtypes_and_shapes_are_refused() -> None:
    with pytest.raises(QuantisationError, match=r"w is torch\.int64"):
        quantise_fp8(torch.zeros(2, 2, dtype=torch.int64), name="w")
    with pytest.raises(QuantisationError, match=r"w: shape .* has no blocks"):
        quantise_fp8(torch.zeros(4), name="w")
    with pytest.raises(QuantisationError, match=r"w: shape .* has no blocks"):
        quantise_fp8(torch.zeros(0, 4), name="w")
    with pytest.raises(QuantisationError, match="3 rows are not 2 equal parts"):
        quantise_fp8(torch.zeros(3, 4), row_parts=2)


def test_unusable_scales_are_refused() -> None:
    ours = quantise_fp8(matrix(130, 130))

    def refused(scale: torch.Tensor, match: str) -> None:
        with pytest.raises(QuantisationError, match=match):
            dequantise_fp8(Quantised(ours.values, scale), name="w")

    refused(ours.scale[:1], r"w: its block scales have shape \(1, 2\), they must have \(2, 2\)")
    refused(torch.where(ours.scale == ours.scale[1, 1], torch.nan, ours.scale), r"1 of 4 .* first at \(1, 1\) is nan")
    refused(torch.zeros_like(ours.scale), "4 of 4 block scales are not positive and finite")
    refused(-ours.scale, "not positive")
    refused(ours.scale.double(), "torch.float64")
    refused(torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu), r"4 block scale\(s\) are NaN")
    with pytest.raises(QuantisationError, match=r"w is torch\.float32"):
        dequantise_fp8(Quantised(torch.zeros(2, 2), torch.ones(1, 1)), name="w")


def test_stacked_experts_and_stacked_rows_have_the_codes_that_they_have_alone() -> None:
    gate, up = torch.stack([matrix(70, 130, s) for s in (1, 2)]), torch.stack([matrix(70, 130, s) * 9 for s in (3, 4)])
    stack = quantise_fp8(torch.cat([gate, up], dim=1), row_parts=2)
    assert stack.scale.shape == (2, 2, 2)
    for expert in range(2):
        for part, rows in ((gate, slice(0, 70)), (up, slice(70, 140))):
            alone = quantise_fp8(part[expert])
            index = 0 if rows.start == 0 else 1
            assert torch.equal(bits(stack.values[expert, rows]), bits(alone.values))
            assert torch.equal(stack.scale[expert, index : index + 1], alone.scale)
    back = dequantise_fp8(stack, row_parts=2)
    assert torch.equal(back[1, 70:], dequantise_fp8(quantise_fp8(up[1])))


@pytest.mark.parametrize("shape", [(150, 140), (128, 256)])
def test_layout_in_memory_does_not_matter(shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(bits(quantise_fp8(strided).values), bits(quantise_fp8(x).values))
    wide = torch.cat([x, x], dim=1)[:, : shape[1]]
    assert torch.equal(bits(quantise_fp8(wide).values), bits(quantise_fp8(x).values))


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_every_device_and_thread_count_gives_the_same_bytes(device: str) -> None:
    x = torch.stack([matrix(200, 300, seed) for seed in range(3)])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [quantise_fp8(x, scale_format) for scale_format in FORMATS]  # pyright: ignore[reportArgumentType]
        torch.set_num_threads(3)
        for one, scale_format in zip(alone, FORMATS, strict=True):
            other = quantise_fp8(x.to(device), scale_format)  # pyright: ignore[reportArgumentType]
            assert torch.equal(bits(one.values), bits(other.values).cpu())
            assert np.array_equal(factors(one), factors(Quantised(other.values, other.scale.cpu())))
            back = dequantise_fp8(other)
            assert torch.equal(back.cpu().view(torch.int32), dequantise_fp8(one).view(torch.int32))
    finally:
        torch.set_num_threads(threads)


def test_dequantising_rounds_once_to_the_asked_dtype() -> None:
    ours = quantise_fp8(matrix(40, 40))
    exact = torch.from_numpy(FN[bits(ours.values).numpy()] * factors(ours)[0, 0])
    assert torch.equal(dequantise_fp8(ours), exact.float())
    assert torch.equal(dequantise_fp8(ours, torch.bfloat16), exact.float().to(torch.bfloat16))


# --- e4m3fnuz ---------------------------------------------------------------------------------------------------------


def test_fnuz_divides_by_240_and_has_no_negative_zero() -> None:
    x = matrix(130, 40, seed=5)
    ours = quantise_fp8_fnuz(x)
    assert ours.values.dtype == torch.float8_e4m3fnuz
    amax = x[:BLOCK].abs().max()
    assert float(ours.scale[0, 0]) == float(np.float32(amax) / np.float32(240))
    codes = bits(ours.values).numpy()
    assert 0x80 not in codes
    assert {0x7F, 0xFF} & set(codes.flatten().tolist()), "240 is in use"
    scaled = np.clip((x / ours.scale.repeat_interleave(BLOCK, 0)[:130]).numpy().astype(np.float64), -240, 240)
    expected = nearest(scaled, np.where(np.isnan(FNUZ), 0, FNUZ))
    np.testing.assert_array_equal(codes, np.where(expected == 0x80, 0, expected))


@pytest.mark.parametrize("scale_format", FORMATS)
def test_every_e4m3fn_code_is_the_same_value_as_fnuz_with_twice_the_scale(scale_format: str) -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)[None]
    scale = torch.full((1, 2), 3e-3) if scale_format == "float32" else torch.full((1, 2), 118, dtype=torch.uint8)
    scale = scale if scale_format == "float32" else scale.view(torch.float8_e8m0fnu)
    ours = Quantised(codes.view(torch.float8_e4m3fn), scale)
    converted = e4m3fn_to_e4m3fnuz(ours)
    assert torch.equal(dequantise_fp8(converted), dequantise_fp8(ours))
    assert np.array_equal(factors(converted), 2 * factors(ours))
    back = e4m3fnuz_to_e4m3fn(converted)
    assert torch.equal(bits(back.values), torch.where(codes == 0x80, 0, codes).to(torch.uint8))
    assert np.array_equal(factors(back), factors(ours))


def test_conversions_refuse_what_has_no_counterpart() -> None:
    one = torch.ones(1, 1)

    def codes(code: int, dtype: torch.dtype) -> Quantised:
        return Quantised(torch.tensor([[code]], dtype=torch.uint8).view(dtype), one)

    for code in (0x7F, 0xFF):
        with pytest.raises(QuantisationError, match="codes are NaN"):
            e4m3fn_to_e4m3fnuz(codes(code, torch.float8_e4m3fn))
        with pytest.raises(QuantisationError, match="±240"):
            e4m3fnuz_to_e4m3fn(codes(code, torch.float8_e4m3fnuz))
    with pytest.raises(QuantisationError, match="codes are NaN"):
        e4m3fnuz_to_e4m3fn(codes(0x80, torch.float8_e4m3fnuz))
    with pytest.raises(QuantisationError, match=r"expected torch\.float8_e4m3fn"):
        e4m3fn_to_e4m3fnuz(codes(1, torch.float8_e4m3fnuz))
    huge = Quantised(codes(1, torch.float8_e4m3fn).values, torch.full((1, 1), 3e38))
    with pytest.raises(QuantisationError, match="leaves float32"):
        e4m3fn_to_e4m3fnuz(huge)
    smallest = torch.zeros(1, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(QuantisationError, match="leaves e8m0"):
        e4m3fnuz_to_e4m3fn(Quantised(codes(1, torch.float8_e4m3fnuz).values, smallest))


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 127.9, 128.0, 3e35])
def test_codes_times_a_scale_are_rounded_once_at_both_ends_of_float32(scale: float) -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).expand(3, -1).contiguous()
    scales = torch.full((1, 2), scale)
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantise_fp8(Quantised(values, scales), dtype)
        assert torch.equal(found, (values.to(torch.float32) * scales[0, 0]).to(dtype))


@pytest.mark.parametrize("flush", [False, True])
def test_all_codes_decode_to_their_values_also_where_subnormals_are_flushed(flush: bool) -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).to(torch.float32)  # by torch's own conversion
    torch.set_flush_denormal(flush)
    try:
        found = dequantise_fp8(Quantised(codes.view(torch.float8_e4m3fn)[None], torch.ones(1, 2)))[0]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
