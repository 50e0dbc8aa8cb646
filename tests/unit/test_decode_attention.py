"""Decode attention over the slot cache: the compiled kernel and torch's both equal a float64 reference."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout import decode_attention as module

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


def kernel_or_skip():
    found = module.backend()
    if found.kernel is None:
        pytest.skip(found.reason)
    return found.kernel


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_the_kernel_equals_the_reference_within_one_rounding_of_the_output(shape, scale):
    queries, cache, lengths = inputs(*shape, scale)
    got = module._by_kernel(kernel_or_skip(), queries, cache, lengths, 0.125)
    expected = reference(queries, cache, lengths, 0.125)
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=2e-6)


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
    kernel = kernel_or_skip()
    if where == "query":
        queries[1, 4, 7] = torch.nan
    else:
        cache[1, 1, int(where == "value"), 5, 7] = torch.nan
    got = module._by_kernel(kernel, queries, cache, lengths, 0.125)
    assert got[1, 4].isnan().any()
    assert not got[[0, 2]].isnan().any()


def test_a_layout_that_the_kernel_does_not_read_is_refused():
    queries, cache, lengths = inputs(3, 9, 3, 64)
    with pytest.raises(ValueError, match="contiguous"):
        module._by_kernel(kernel_or_skip(), queries, cache.transpose(3, 4), lengths, 0.125)


def test_without_a_compiler_torch_is_used_and_the_reason_is_told(monkeypatch):
    module.backend.cache_clear()
    try:
        monkeypatch.setenv("PATH", "")
        found = module.backend()
        assert found.kernel is None
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
        assert found.kernel is None
        assert "no such target" in found.reason
    finally:
        module.backend.cache_clear()
