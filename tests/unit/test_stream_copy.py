"""A copy past the caches is a copy: every byte, nothing beside them, and torch's own where it does not apply."""

from __future__ import annotations

import pytest
import torch

from lockstep import stream_copy as module
from lockstep.stream_copy import stream_copy

LARGE = 1 << 20


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("beyond", [0, 1, 63, 64, 65, 3 * LARGE + 7])
@pytest.mark.parametrize(("misplaced", "from_misplaced"), [(0, 0), (1, 0), (0, 1), (63, 5), (32, 32)])
def test_every_byte_arrives_and_none_beside_them(beyond: int, misplaced: int, from_misplaced: int) -> None:
    assert module._kernel() is not None, "a C compiler belongs to the set-up of these tests"
    size = LARGE + beyond
    source, around = noise(size + 64)[from_misplaced : from_misplaced + size], noise(size + 200, 1)
    expected = around.clone()
    expected[misplaced : misplaced + size] = source
    stream_copy(around[misplaced : misplaced + size], source)
    assert torch.equal(around, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_types_and_shapes_are_kept(dtype: torch.dtype) -> None:
    source = noise(2 * LARGE).view(dtype).view(16, -1)
    target = torch.zeros(2 * LARGE, dtype=torch.uint8).view(dtype).view(16, -1)
    stream_copy(target, source)
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


def test_what_it_is_not_for_is_copied_by_torch() -> None:
    wide = torch.randn(1024, 1024)
    rounded, turned = torch.zeros(1024, 1024, dtype=torch.bfloat16), torch.zeros(1024, 1024).t()
    stream_copy(rounded, wide)
    stream_copy(turned, wide)
    assert torch.equal(rounded, wide.bfloat16())
    assert torch.equal(turned, wide)
    with pytest.raises(RuntimeError, match="size"):
        stream_copy(torch.zeros(1024, 1023), wide)


def test_without_the_kernel_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kernel", lambda: None)
    target, source = torch.zeros(2 * LARGE, dtype=torch.uint8), noise(2 * LARGE)
    stream_copy(target, source)
    assert torch.equal(target, source)
