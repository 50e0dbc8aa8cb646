"""What decoding does between its products: the compiled kernels and torch's operators agree with a reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.rollout import decode_kernels as module
from lockstep.rollout.decode_kernels import Backend

TORCH = Backend(None, "torch's operators are asked for")

SHAPES = [(3, 9, 3, 64), (5, 4, 2, 128), (2, 6, 1, 16), (4, 4, 4, 32)]


def reference(queries: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, scaling: float) -> torch.Tensor:
    """One row and head at a time, in float64."""
    rows, heads, _ = queries.shape
    group = heads // cache.shape[1]
    out = torch.empty(queries.shape, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            keys, values = cache[row, head // group, :, : int(lengths[row])].double()
            out[row, head] = (keys @ queries[row, head].double() * scaling).softmax(0) @ values
    return out


def inputs(rows: int, heads: int, kv_heads: int, size: int, scale: float = 1.0):
    generator = torch.Generator().manual_seed(heads)
    # More rows than queries, and queries inside wider rows, as the decoder has them.
    cache = torch.randn(rows + 2, kv_heads, 2, 40, size, generator=generator).bfloat16()
    wide = (torch.randn(rows, (heads + 2) * size, generator=generator) * scale).bfloat16()
    lengths = torch.tensor([1, 40, 17, 33, 2][:rows])
    return wide.view(rows, heads + 2, size)[:, :heads], cache, lengths


def compiled() -> Backend:
    found = module.backend()
    assert found.kernels is not None, f"a C compiler belongs to the set-up of these tests: {found.reason}"
    return found


BOTH = pytest.mark.parametrize("by", ["kernels", "torch"])


def way(name: str) -> Backend:
    return compiled() if name == "kernels" else TORCH


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_the_kernel_equals_the_reference_within_one_rounding_of_the_output(shape, scale):
    queries, cache, lengths = inputs(*shape, scale)
    got = module.decode_attention(queries, cache, lengths, 0.125, compiled())
    expected = reference(queries, cache, lengths, 0.125)
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_scaling_that_is_no_power_of_two_is_not_rounded_into_the_queries(shape):
    queries, cache, lengths = inputs(*shape, 30.0)
    got = module.decode_attention(queries, cache, lengths, 0.0884, compiled())
    torch.testing.assert_close(got.double(), reference(queries, cache, lengths, 0.0884), rtol=2**-8, atol=2e-6)


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_that_are_all_far_from_zero_neither_vanish_nor_overflow(by, shape, sign):
    """Between 200 and 400 on one side: only their differences may reach the exponential."""
    queries, cache, lengths = inputs(*shape)
    queries = torch.full_like(queries, sign * 300.0 / queries.shape[2])
    cache[:, :, 0] = cache[:, :, 0].sign() * 0.05 + 1
    got = module.decode_attention(queries, cache, lengths, 1.0, way(by))
    expected = reference(queries, cache, lengths, 1.0)
    torch.testing.assert_close(got.double(), expected, rtol=2**-6, atol=2**-6 if by == "torch" else 2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_attention_equals_the_reference_in_float32(shape):
    queries, cache, lengths = inputs(*shape)
    got = module.decode_attention(queries.float(), cache.float(), lengths, 0.125)
    torch.testing.assert_close(got.double(), reference(queries, cache, lengths, 0.125), rtol=1e-5, atol=1e-6)


def test_positions_beyond_a_rows_length_are_not_read():
    queries, cache, lengths = inputs(3, 9, 3, 64)
    clean = module.decode_attention(queries, cache, lengths, 0.125)
    for row, length in enumerate(lengths.tolist()):
        cache[row, :, :, length:] = 1e30
    cache[3:] = torch.nan
    assert torch.equal(module.decode_attention(queries, cache, lengths, 0.125), clean)


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_comes_through_and_stays_in_its_row(where):
    queries, cache, lengths = inputs(3, 9, 3, 64)
    queries = queries.clone()
    if where == "query":
        queries[1, 4, 7] = torch.nan
    else:
        cache[1, 1, int(where == "value"), 5, 7] = torch.nan
    got = module.decode_attention(queries, cache, lengths, 0.125, compiled())
    assert got[1, 4].isnan().any()
    assert not got[[0, 2]].isnan().any()


def test_a_layout_that_the_kernel_does_not_read_is_refused():
    queries, cache, lengths = inputs(3, 9, 3, 64)
    with pytest.raises(ValueError, match="contiguous"):
        module.decode_attention(queries, cache.transpose(3, 4), lengths, 0.125, compiled())


def test_without_a_compiler_torch_is_used_and_the_reason_is_told(monkeypatch):
    module.backend.cache_clear()
    try:
        monkeypatch.setenv("PATH", "")
        found = module.backend()
        assert found.kernels is None
        assert "no C compiler" in found.reason
        queries, cache, lengths = inputs(3, 9, 3, 64)
        expected = reference(queries, cache, lengths, 0.125)
        torch.testing.assert_close(
            module.decode_attention(queries, cache, lengths, 0.125).double(), expected, rtol=2e-2, atol=1e-2
        )
    finally:
        module.backend.cache_clear()


def test_a_compiler_that_fails_is_told(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'no such target' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module.backend.cache_clear()
    try:
        found = module.backend()
        assert found.kernels is None
        assert "no such target" in found.reason
    finally:
        module.backend.cache_clear()


# --- norms, gates and rotations ---------------------------------------------------------------------------------------


def norm_of(size: int, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    weight = torch.rand(size, generator=torch.Generator().manual_seed(0)) + 0.5
    return SimpleNamespace(weight=weight.to(dtype), variance_epsilon=1e-5)


def halves(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@BOTH
@pytest.mark.parametrize("with_change", [True, False])
@pytest.mark.parametrize("shape", [(1, 16), (33, 576), (64, 1024)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_adding_and_normalising_equals_a_float64_reference(by, with_change, shape, scale):
    norm, hidden, change = norm_of(shape[1]), halves(shape, 1, scale), halves(shape, 2, scale)
    state = hidden.clone()
    out = module.add_rms_norm(norm, state, change if with_change else None, way(by))
    summed = (hidden.float() + change.float()).bfloat16() if with_change else hidden
    assert torch.equal(state, summed), "the residual stream is rounded once, as by an addition"
    exact = summed.double() / (summed.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = norm.weight.double() * exact.bfloat16().double()
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-30)


@BOTH
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (40, 3072)])
def test_a_gate_equals_a_float64_reference_over_its_whole_range(by, shape):
    gate_up = halves(shape, 3, 30.0)
    gate_up[0, :16] = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88, -88, 89, -89, 1e4, -1e4, 3e38, -3e38, 1, -1, 20, -20])
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = (gate * torch.sigmoid(gate)).bfloat16().double() * up
    got = module.silu_mul(gate_up, way(by))
    torch.testing.assert_close(got.double(), expected.bfloat16().double(), rtol=2**-7, atol=1e-34)


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "size"), [(1, 1, 1, 32), (5, 9, 3, 64), (64, 4, 2, 128)])
def test_rotation_and_cache_are_the_same_bits_in_both_ways_and_nothing_else_is_written(rows, heads, kv_heads, size):
    qkv, cosines, sines = (
        halves((rows, heads + 2 * kv_heads, size), 4),
        halves((rows, 1, size), 5),
        halves((rows, 1, size), 6),
    )
    positions = torch.arange(rows) * 7 % 11
    before = halves((rows + 2, kv_heads, 2, 12, size), 7)
    results = []
    for by in (compiled(), TORCH):
        rotated, cache = qkv.clone(), before.clone()
        module.rotate_append(rotated, (cosines, sines), cache, positions, heads, by)
        results.append((rotated, cache))
    (rotated, cache), (expected, expected_cache) = results
    assert torch.equal(rotated, expected)
    assert torch.equal(cache, expected_cache)
    x = qkv[:, : heads + kv_heads].double()
    exact = x * cosines.double() + x.roll(size // 2, -1) * sines.double()
    torch.testing.assert_close(rotated[:, : heads + kv_heads].double(), exact, rtol=2**-6, atol=2**-5)
    assert torch.equal(rotated[:, heads + kv_heads :], qkv[:, heads + kv_heads :]), "values are not rotated"
    for row in range(rows):
        place = cache[row, :, :, positions[row]]
        assert torch.equal(place[:, 0], rotated[row, heads : heads + kv_heads])
        assert torch.equal(place[:, 1], rotated[row, heads + kv_heads :])
        before[row, :, :, positions[row]] = place
    assert torch.equal(cache, before)


def test_nan_comes_through_norm_and_gate_and_stays_in_its_row():
    hidden, change, gate_up = halves((3, 64), 8), halves((3, 64), 9), halves((3, 64), 10)
    change[1, 5] = gate_up[1, 7] = torch.nan
    normed = module.add_rms_norm(norm_of(64), hidden, change, compiled())
    gated = module.silu_mul(gate_up, compiled())
    assert normed[1].isnan().all()
    assert gated[1, 7].isnan()
    assert not normed[[0, 2]].isnan().any()
    assert int(gated.isnan().sum()) == 1


def test_other_types_and_sizes_take_torchs_way():
    wide, odd = halves((3, 64), 11).float(), halves((3, 24), 12)
    norm = norm_of(64, torch.float32)
    assert torch.equal(
        module.add_rms_norm(norm, wide.clone(), None), module.add_rms_norm(norm, wide.clone(), None, TORCH)
    )
    assert torch.equal(module.silu_mul(odd), module.silu_mul(odd, TORCH))
    mixed = module.add_rms_norm(norm, wide.bfloat16(), None, compiled())
    assert mixed.dtype is torch.float32, "a float32 weight on bfloat16 rows is torch's to promote"


def test_a_strided_tensor_is_refused_by_a_kernel():
    with pytest.raises(ValueError, match="contiguous"):
        module.silu_mul(halves((6, 128), 13)[:, ::2], compiled())
