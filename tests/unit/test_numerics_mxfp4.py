"""mxfp4 against its definition: all sixteen codes, every tie, the scale's rule at its borders, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.numerics.blocks import QuantisationError, Quantised, bits
from lockstep.numerics.mxfp4 import BLOCK, dequantise_mxfp4, packed_shape, quantise_mxfp4, scale_shape
from tests.unit import torchao_vectors

# The table of the OCP specification, by code.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nibbles(packed: torch.Tensor) -> np.ndarray:
    """Codes in order, low nibble first."""
    flat = packed.numpy()
    return np.stack([flat & 15, flat >> 4], axis=-1).reshape(*flat.shape[:-1], -1)


def nearest(values: np.ndarray) -> np.ndarray:
    distance = np.abs(np.abs(values)[..., None] - VALUES[:8])
    best = distance == distance.min(-1, keepdims=True)
    codes = np.arange(8)
    even = np.where(best & (codes % 2 == 0), codes, 99).min(-1)
    code = np.where(best.sum(-1) == 2, even, np.where(best, codes, 99).min(-1))
    return code | (np.signbit(values).astype(np.int64) << 3)


def reference(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, e8m0 bytes) of float32 rows, block by block."""
    blocks = x.reshape(-1, BLOCK)
    codes, scales = np.zeros(blocks.shape, np.int64), np.zeros(len(blocks), np.int64)
    for i, block in enumerate(blocks):
        amax, exponent = Fraction(float(np.abs(block).max())), -126
        while amax > 6 * Fraction(2) ** exponent:
            exponent += 1
        codes[i], scales[i] = nearest(block.astype(np.float64) * 2.0**-exponent), exponent + 127
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)


def rows(num_rows: int, num_blocks: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, num_blocks * BLOCK, generator=generator)
    values *= torch.exp2(torch.randint(-3, 4, (num_rows, 1), generator=generator).float() * 5)
    values.view(-1)[::17] = 0.0
    values.view(-1)[::19] = -0.0
    return values


def test_all_codes_mean_what_the_table_says_and_the_low_nibble_comes_first() -> None:
    packed = torch.tensor([[low | (low + 1) << 4 for low in range(0, 16, 2)] * 2], dtype=torch.uint8)
    scale = torch.tensor([[127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    ours = dequantise_mxfp4(Quantised(packed, scale))[0]
    np.testing.assert_array_equal(ours.numpy(), np.tile(VALUES, 2))
    assert bool(torch.signbit(ours[8])), "code 8 is −0"
    half = torch.tensor([[128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    np.testing.assert_array_equal(dequantise_mxfp4(Quantised(packed, half))[0].numpy(), 2 * np.tile(VALUES, 2))
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 6.0, -0.5
    assert int(quantise_mxfp4(x).values[0, 0]) == 0x97


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (7, 5)])
def test_codes_and_scales_are_those_of_the_definition(shape: tuple[int, int]) -> None:
    x = rows(*shape)
    ours = quantise_mxfp4(x)
    codes, scales = reference(x.numpy())
    np.testing.assert_array_equal(nibbles(ours.values), codes)
    np.testing.assert_array_equal(bits(ours.scale).numpy(), scales)


def test_every_tie_goes_to_the_even_code() -> None:
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    around = np.concatenate([middles, np.nextafter(middles, np.float32(9)), np.nextafter(middles, np.float32(0))])
    x = np.zeros((2, 32), np.float32)
    x[0, :21], x[0, 31] = around, 6.0
    x[1] = -x[0]
    ours = quantise_mxfp4(torch.from_numpy(x))
    assert bits(ours.scale).tolist() == [[127], [127]]
    np.testing.assert_array_equal(nibbles(ours.values), nearest(x.astype(np.float64)))
    assert nibbles(ours.values)[0, :7].tolist() == [0, 2, 2, 4, 4, 6, 6]


def test_the_scale_is_the_smallest_power_of_two_that_does_not_cut() -> None:
    for exponent in (-120, -1, 0, 30, 125):
        border = np.float32(6 * 2.0**exponent)
        for amax, expected in ((border, exponent), (np.nextafter(border, np.float32(np.inf)), exponent + 1)):
            x = torch.zeros(1, 32)
            x[0, 5] = float(amax)
            ours = quantise_mxfp4(x)
            assert int(bits(ours.scale)) - 127 == expected


def test_transformers_unpacks_to_the_same_values() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    ours = quantise_mxfp4(rows(6, 3))
    theirs = Fp8Dequantize(SimpleNamespace(quantization_config=None))._dequantize_one(
        ours.values.view(torch.int8), ours.scale, output_dtype=torch.float32
    )
    assert torch.equal(theirs, dequantise_mxfp4(ours))


@pytest.mark.parametrize("dtype", torchao_vectors.DTYPES)
@pytest.mark.parametrize("seed", torchao_vectors.SEEDS)
def test_torchao_has_quantised_the_same_weights_to_the_same_bytes(seed: int, dtype: str) -> None:
    ours = quantise_mxfp4(torchao_vectors.values(seed, dtype))
    digest = torchao_vectors.digest(ours.values, ours.scale, dequantise_mxfp4(ours))
    assert digest == torchao_vectors.TORCHAO[f"mxfp4 {dtype} {seed}"]


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 2**31),
    magnitude=st.floats(-36, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_the_error_is_half_a_step_and_a_second_pass_gives_the_same_weights(
    shape: tuple[int, int, int], seed: int, magnitude: float, dtype: torch.dtype
) -> None:
    experts, num_rows, num_blocks = shape
    x = (rows(experts * num_rows, num_blocks, seed) * 10.0**magnitude).to(dtype).view(experts, num_rows, -1)
    first, again = quantise_mxfp4(x), quantise_mxfp4(x.clone())
    assert torch.equal(first.values, again.values)
    assert torch.equal(bits(first.scale), bits(again.scale))
    assert first.values.shape == packed_shape(tuple(x.shape))
    assert first.scale.shape == scale_shape(tuple(x.shape))
    back = dequantise_mxfp4(first)
    scale = torch.exp2(bits(first.scale).double() - 127).repeat_interleave(BLOCK, -1)
    # The step is 0.5 up to 2, then 1 up to 4, then 2, all times the scale.
    magnitude_in_steps = x.double().abs() / scale
    step = torch.where(magnitude_in_steps < 2, 0.5, torch.where(magnitude_in_steps < 4, 1.0, 2.0))
    assert bool(((back.double() - x.double()).abs() <= step / 2 * scale + 2.0**-149).all())
    second = quantise_mxfp4(back)
    assert torch.equal(dequantise_mxfp4(second).view(torch.int32), back.view(torch.int32))
    third = quantise_mxfp4(dequantise_mxfp4(second))
    assert torch.equal(second.values, third.values)
    assert torch.equal(bits(second.scale), bits(third.scale))
    for expert in range(experts):
        assert torch.equal(quantise_mxfp4(x[expert]).values, first.values[expert])


def test_blocks_of_zeros_are_zeros_and_keep_their_signs() -> None:
    x = torch.zeros(2, 64)
    x[1, 3] = -0.0
    x[0, 40] = 1e-45
    ours = quantise_mxfp4(x)
    assert bits(ours.scale).tolist() == [[1, 1], [1, 1]]
    assert nibbles(ours.values)[1, 3] == 8
    assert nibbles(ours.values).sum() == 8
    assert bool((dequantise_mxfp4(ours) == 0).all())


def test_the_largest_numbers_do_not_overflow() -> None:
    x = torch.full((1, 32), 2.0**127)
    back = dequantise_mxfp4(quantise_mxfp4(-x))
    assert bool(torch.isfinite(back).all())
    assert float(back.max()) < 0


def test_what_has_no_form_is_refused_by_name() -> None:
    with pytest.raises(QuantisationError, match=r"w: shape \(2, 33\): mxfp4 has blocks of 32"):
        quantise_mxfp4(torch.zeros(2, 33), "w")
    with pytest.raises(QuantisationError, match=r"w is torch\.int32"):
        quantise_mxfp4(torch.zeros(2, 32, dtype=torch.int32), "w")
    x = torch.zeros(2, 64)
    x[1, 40] = float("inf")
    with pytest.raises(QuantisationError, match=r"w: 1 value\(s\) are not finite, the first at \(1, 40\) is inf"):
        quantise_mxfp4(x, "w")


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_every_device_and_layout_gives_the_same_bytes(device: str) -> None:
    x = rows(40, 6)
    one, other = quantise_mxfp4(x), quantise_mxfp4(x.t().contiguous().t().to(device))
    assert torch.equal(one.values, other.values.cpu())
    assert torch.equal(bits(one.scale), bits(other.scale).cpu())
    assert torch.equal(dequantise_mxfp4(one), dequantise_mxfp4(other).cpu())


def test_unusable_codes_and_scales_are_refused() -> None:
    ours = quantise_mxfp4(rows(2, 2))
    with pytest.raises(QuantisationError, match=r"w: its block scales have shape \(2, 1\), they must have \(2, 2\)"):
        dequantise_mxfp4(Quantised(ours.values, ours.scale[:, :1]), name="w")
    with pytest.raises(QuantisationError, match=r"w: its block scales are torch\.float32"):
        dequantise_mxfp4(Quantised(ours.values, torch.ones(2, 2)), name="w")
    broken = torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(QuantisationError, match="NaN"):
        dequantise_mxfp4(Quantised(ours.values, broken), name="w")
    with pytest.raises(QuantisationError, match=r"w is torch\.int8"):
        dequantise_mxfp4(Quantised(ours.values.view(torch.int8), ours.scale), name="w")
