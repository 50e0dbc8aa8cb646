"""Sums over a bucket's words: kernel, numpy and a naive loop agree to the bit, whatever the pieces."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.native import NoKernel
from lockstep.numerics import row_sums as module
from lockstep.numerics.row_sums import ROW_BYTES, ROW_WORDS, RowSums, tensor_digest
from lockstep.records import Manifest, TensorSpec
from lockstep.refit import buckets
from lockstep.refit.buckets import Filler, check_seal, content, plan_buckets, seal


def naive(data: bytes) -> tuple[list[int], list[int]]:
    """Row and column sums in Python's integers."""
    rows, columns = [0] * (len(data) // ROW_BYTES), [0] * ROW_WORDS
    for index in range(len(data) // 8):
        word = int.from_bytes(data[8 * index : 8 * index + 8], "little")
        rows[index // ROW_WORDS] = (rows[index // ROW_WORDS] + word) % 2**64
        columns[index % ROW_WORDS] = (columns[index % ROW_WORDS] + word) % 2**64
    return rows, columns


@given(data=st.data(), seed=st.integers(0, 2**32 - 1), kernels=st.booleans())
def test_a_tensors_digest_is_that_of_its_bytes_in_rows_whatever_its_strides_and_sees_one_changed_byte(
    data, seed, kernels
):
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn]))
    shape = data.draw(st.sampled_from([(), (1,), (3, 5), (7, 512), (513, 9), (2, 3, 341)]))
    key = data.draw(st.integers(0, 2**64 - 1))
    raw = np.random.default_rng(seed).integers(0, 2, math.prod(shape) * dtype.itemsize, np.uint8)
    tensor = torch.from_numpy(raw.copy()).view(dtype).reshape(shape)
    with pytest.MonkeyPatch.context() as patched:
        if not kernels:
            patched.setattr(module, "kernel", lambda: None)
        digest = tensor_digest(tensor, key)
        strided = tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
        assert tensor_digest(strided, key) == digest
        assert tensor_digest(tensor, key ^ 1) != digest
        changed = raw.copy()
        changed[data.draw(st.integers(0, len(raw) - 1))] ^= 1
        assert tensor_digest(torch.from_numpy(changed).view(dtype).reshape(shape), key) != digest
        assert tensor_digest(torch.from_numpy(np.append(raw, np.uint8(0))), key) != digest, "a zero more is a byte more"
    assert tensor_digest(tensor, key) == digest


def as_lists(sums: RowSums) -> tuple[list[int], list[int]]:
    return sums.rows.tolist(), sums.columns.tolist()


def need_kernel() -> None:
    assert module.kernel() is not None, "a C compiler belongs to the set-up of these tests"


@given(
    seed=st.integers(0, 2**32 - 1),
    pieces=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 9000)), min_size=1, max_size=6),
    misplaced=st.integers(0, 7),
    order=st.randoms(use_true_random=False),
)
def test_pieces_of_any_length_place_and_order_sum_and_copy_as_the_whole(seed, pieces, misplaced, order):
    need_kernel()
    offset, placed = 0, []
    for gap, length in pieces:
        offset = (offset + gap + 7) // 8 * 8
        placed.append((offset, length))
        offset += length
    num_bytes = (offset // ROW_BYTES + 1) * ROW_BYTES
    noise = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes + 8, np.uint8))
    source = noise[misplaced : misplaced + num_bytes]  # tensors of 1-byte types lie anywhere
    buffer, sums = torch.zeros(num_bytes, dtype=torch.uint8), RowSums(num_bytes)
    order.shuffle(placed)
    for offset, length in placed:
        sums.take(source[offset : offset + length], offset, buffer[offset : offset + length])
    expected = torch.zeros_like(buffer)
    for offset, length in placed:
        expected[offset : offset + length] = source[offset : offset + length]
    assert torch.equal(buffer, expected)
    assert as_lists(sums) == naive(expected.numpy().tobytes())
    assert as_lists(RowSums.of(expected)) == as_lists(sums)


def test_numpy_takes_the_same_sums(monkeypatch):
    data = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 300 * ROW_BYTES, np.uint8))
    need_kernel()
    key = 0x0123456789ABCDEF
    by_kernel, mixed = as_lists(RowSums.of(data)), RowSums.of(data).mixed(key)
    monkeypatch.setattr(module, "kernel", lambda: None)
    assert (as_lists(RowSums.of(data)), RowSums.of(data).mixed(key)) == (by_kernel, mixed)
    with pytest.raises(NoKernel):
        RowSums(ROW_BYTES).take(data[:8], 0, None)


@pytest.mark.parametrize(("offset", "length", "target"), [(4, 8, 8), (-8, 8, 8), (ROW_BYTES - 8, 16, 16), (0, 16, 8)])
def test_a_place_outside_is_refused_before_anything_is_written(offset, length, target):
    need_kernel()
    sums, buffer = RowSums(ROW_BYTES), torch.zeros(target, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"bytes"):
        sums.take(torch.ones(length, dtype=torch.uint8), offset, buffer)
    assert not buffer.any()
    assert as_lists(sums) == ([0], [0] * ROW_WORDS)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch):
    class Wrong:
        def __init__(self) -> None:
            self.row_sums = lambda *_: None
            self.mixed = lambda *_: 0

    module.kernel.cache_clear()
    try:
        monkeypatch.setattr(module, "load_kernel", lambda _: Wrong())
        assert module.kernel() is None
    finally:
        module.kernel.cache_clear()


def test_a_bucket_is_sealed_alike_with_and_without_the_kernel(monkeypatch):
    """Trainer and engine may have been built by different compilers, or one of them by none."""
    need_kernel()
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "odd": torch.randn(701, generator=generator).bfloat16(),
        "turned": torch.randn(40, 90, generator=generator).t(),
        "bytes": torch.randint(0, 256, (5001,), generator=generator, dtype=torch.uint8),
        "empty": torch.empty(0, 4),
    }
    specs = tuple(
        TensorSpec(name, tuple(one.shape), str(one.dtype).removeprefix("torch."), name) for name, one in tensors.items()
    )
    (bucket,) = plan_buckets(Manifest(3, specs), 1 << 20)
    digests = []
    for kernel in (module.kernel(), None):
        for user in (module, buckets):
            monkeypatch.setattr(user, "kernel", lambda kernel=kernel: kernel)
        buffer = torch.full((bucket.num_bytes + 64,), 7, dtype=torch.uint8)
        filler = Filler(tensors.items())
        sums = filler.fill(bucket, buffer)
        filler.finish()
        digests.append((seal(bucket, buffer, transfer=5, version=3, sums=sums), content(bucket, buffer, sums)))
        assert check_seal(bucket, buffer, transfer=5, version=3) == digests[-1][0]
        for slot in bucket.slots:
            assert torch.equal(slot.view(buffer), tensors[slot.spec.name])
    assert digests[0] == digests[1]
