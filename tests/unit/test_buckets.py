"""Buckets: the layout keeps groups whole whatever the size, and the digest sees what a transfer can do to bytes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.records import Manifest, TensorSpec
from lockstep.refit.buckets import (
    ALIGNMENT,
    TRAILER_BYTES,
    Bucket,
    Filler,
    TransferError,
    check_seal,
    dtype_of,
    fold,
    plan_buckets,
    seal,
)

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "uint8", "int64", "bool")


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Tensors of random shapes and types; groups mostly, but not always, of neighbours."""
    shapes = st.lists(st.integers(0, 40), max_size=3)
    specs = [
        TensorSpec(f"t{i}", tuple(draw(shapes)), draw(st.sampled_from(DTYPES)), f"g{draw(st.integers(0, i // 2))}")
        for i in range(draw(st.integers(0, 12)))
    ]
    return Manifest(draw(st.integers(0, 2**40)), tuple(specs))


def random_tensor(spec: TensorSpec, generator: random.Random) -> torch.Tensor:
    num_bytes = math.prod(spec.shape) * dtype_of(spec).itemsize
    data = torch.tensor(list(generator.randbytes(num_bytes)), dtype=torch.uint8)
    if spec.dtype == "bool":
        data &= 1
    return data.view(dtype_of(spec)).view(spec.shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def buffer_for(plan: Seq[Bucket]) -> torch.Tensor:
    # Garbage, as a reused buffer holds.
    return torch.full((max(bucket.num_bytes for bucket in plan) + TRAILER_BYTES,), 0xA5, dtype=torch.uint8)


@given(manifests(), st.integers(1, 20_000), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_every_tensor_arrives_bit_for_bit_and_no_group_is_split(manifest, bucket_bytes, seed):
    generator = random.Random(seed)
    plan = plan_buckets(manifest, bucket_bytes)
    assert [slot.spec for bucket in plan for slot in bucket.slots] == list(manifest.tensors)
    places = {slot.spec.name: bucket.number for bucket in plan for slot in bucket.slots}
    for spec in manifest.tensors:
        assert len({places[one.name] for one in manifest.tensors if one.group == spec.group}) == 1
    tensors = {spec.name: random_tensor(spec, generator) for spec in manifest.tensors}
    filler = Filler(tensors.items())
    for bucket in plan:
        buffer = buffer_for(plan)
        filler.fill(bucket, buffer)
        sent = seal(bucket, buffer, transfer=7, version=manifest.version)
        assert check_seal(bucket, buffer, transfer=7, version=manifest.version) == sent
        for slot in bucket.slots:
            assert slot.offset % ALIGNMENT == 0
            assert torch.equal(bits(slot.view(buffer)), bits(tensors[slot.spec.name]))
    filler.finish()


def spec(name: str, *shape: int, dtype: str = "float32", group: str = "") -> TensorSpec:
    return TensorSpec(name, shape, dtype, group or name)


def test_buckets_hold_as_much_as_fits_and_a_large_group_gets_one_of_its_own_size():
    specs = (spec("a", 64), spec("b", 64), spec("q", 512, group="qkv"), spec("k", 512, group="qkv"), spec("z", 64))
    plan = plan_buckets(Manifest(1, specs), 1024)
    assert [[slot.spec.name for slot in bucket.slots] for bucket in plan] == [["a", "b"], ["q", "k"], ["z"]]
    assert [bucket.num_bytes for bucket in plan] == [4096, 4096, 4096]  # whole rows of the digest
    one = plan_buckets(Manifest(1, specs), 1 << 20)
    assert len(one) == 1


def test_a_group_with_strangers_between_its_members_stays_whole():
    specs = (spec("q", 64, group="qkv"), spec("x", 64), spec("k", 64, group="qkv"), spec("y", 64))
    plan = plan_buckets(Manifest(1, specs), 1)
    assert [[slot.spec.name for slot in bucket.slots] for bucket in plan] == [["q", "x", "k"], ["y"]]


def test_a_dtype_that_torch_lacks_is_named():
    with pytest.raises(TransferError, match="w: torch has no dtype 'float3'"):
        plan_buckets(Manifest(1, (spec("w", 4, dtype="float3"),)), 100)


@pytest.mark.parametrize(
    ("brought", "named"),
    [
        ([("a", torch.zeros(4))], "missing: the source ended before b"),
        ([("b", torch.zeros(4)), ("a", torch.zeros(4))], "brought b where its manifest has a"),
        ([("a", torch.zeros(5)), ("b", torch.zeros(4))], r"a came as float32 \(5,\)"),
        ([("a", torch.zeros(4).half()), ("b", torch.zeros(4))], "a came as float16"),
        ([("a", torch.zeros(4)), ("b", torch.zeros(4)), ("c", torch.zeros(4))], "extra: the source brought c"),
    ],
)
def test_a_source_that_is_not_its_manifest_is_named(brought, named):
    plan = plan_buckets(Manifest(1, (spec("a", 4), spec("b", 4))), 1 << 20)

    def fill_all() -> None:
        filler = Filler(brought)
        for bucket in plan:
            filler.fill(bucket, buffer_for(plan))
        filler.finish()

    with pytest.raises(TransferError, match=named):
        fill_all()


def test_a_strided_tensor_travels_as_its_values():
    plan = plan_buckets(Manifest(1, (spec("w", 3, 5),)), 1 << 20)
    tensor, buffer = torch.arange(15.0).view(5, 3).T, buffer_for(plan)
    Filler([("w", tensor)]).fill(plan[0], buffer)
    assert torch.equal(plan[0].slots[0].view(buffer), tensor)


# --- the digest -------------------------------------------------------------------------------------------------------


def sealed(num_rows: int = 300, seed: int = 0) -> tuple[Bucket, torch.Tensor]:
    """A bucket full of random words: several blocks of rows."""
    (bucket,) = plan_buckets(Manifest(5, (spec("w", num_rows, 1024),)), 1 << 30)
    buffer = buffer_for([bucket])
    generator = torch.Generator().manual_seed(seed)
    Filler([("w", torch.randn(num_rows, 1024, generator=generator))]).fill(bucket, buffer)
    seal(bucket, buffer, transfer=9, version=5)
    return bucket, buffer


def refused(bucket: Bucket, buffer: torch.Tensor, **changed: int) -> str:
    with pytest.raises(TransferError) as caught:
        check_seal(bucket, buffer, **{"transfer": 9, "version": 5, **changed})
    return str(caught.value)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_any_changed_bit_is_seen(data):
    bucket, buffer = sealed(num_rows=3)
    place = data.draw(st.integers(0, bucket.num_bytes - 1))
    buffer[place] ^= 1 << data.draw(st.integers(0, 7))
    assert "bucket 0 is corrupt" in refused(bucket, buffer)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_two_swapped_pieces_are_seen(data):
    bucket, buffer = sealed(num_rows=20)
    size = data.draw(st.sampled_from([8, 256, 4096, 8192]))
    count = bucket.num_bytes // size
    one, other = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    pieces = buffer[: count * size].view(count, size)
    pieces[[one, other]] = pieces[[other, one]].clone()
    assert "bucket 0 is corrupt" in refused(bucket, buffer)


def test_words_that_differ_in_their_highest_bit_alone_are_seen_when_swapped():
    bucket, buffer = sealed(num_rows=4)
    words = buffer[: bucket.num_bytes].view(torch.int64)
    words[10], words[3 * 512 + 77] = 1, -(2**63) + 1
    seal(bucket, buffer, transfer=9, version=5)
    words[10], words[3 * 512 + 77] = -(2**63) + 1, 1
    assert "corrupt" in refused(bucket, buffer)


def test_a_stale_or_torn_bucket_is_seen():
    bucket, buffer = sealed(seed=1)
    _, other = sealed(seed=2)
    torn = buffer.clone()
    torn[bucket.num_bytes // 2 : bucket.num_bytes] = other[bucket.num_bytes // 2 : bucket.num_bytes]
    assert "corrupt" in refused(bucket, torn)
    zeroed = buffer.clone()
    zeroed[bucket.num_bytes - 4096 : bucket.num_bytes] = 0
    assert "corrupt" in refused(bucket, zeroed)


def test_a_trailer_of_another_transfer_version_or_bucket_is_named():
    bucket, buffer = sealed()
    assert "says transfer 9, expected 8" in refused(bucket, buffer, transfer=8)
    assert "says version 5, expected 6" in refused(bucket, buffer, version=6)
    assert "says number 0, expected 1" in refused(Bucket(1, bucket.slots, bucket.num_bytes), buffer)
    assert "cut or torn" in refused(Bucket(0, bucket.slots, bucket.num_bytes - 4096), buffer)
    assert "its buffer ends before the trailer" in refused(bucket, buffer[:-8])


def test_digests_know_their_place_and_do_not_repeat():
    seen = set()
    for version in (1, 2):
        for number in (0, 1):
            bucket, buffer = sealed(num_rows=2)
            seen.add(seal(Bucket(number, bucket.slots, bucket.num_bytes), buffer, transfer=1, version=version))
    assert len(seen) == 4
    one, other = sorted(seen)[:2]
    assert fold([one, other]) != fold([other, one]) != fold([one, other, other])
    assert fold([one, other]) == fold([one, other])


def test_the_digest_by_torch_is_that_by_numpy(monkeypatch):
    bucket, buffer = sealed()
    expected = seal(bucket, buffer, transfer=1, version=1)

    class Elsewhere(torch.Tensor):
        """Pretends to lie on a GPU, so that the digest takes torch's own sums."""

        @property
        def device(self):
            return torch.device("meta")

    found = seal(bucket, buffer.as_subclass(Elsewhere), transfer=1, version=1)  # pyright: ignore[reportArgumentType]
    assert found == expected
