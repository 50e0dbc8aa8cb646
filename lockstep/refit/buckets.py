"""Buckets: how the tensors of a manifest lie in buffers of a fixed size, and how each buffer proves what it holds.

    │ tensor │ pad to 256 │ tensor │ … │ pad to 4096 │ trailer, 64 bytes │

The layout is a pure function of the manifest and the bucket size, so both ends compute it and no offset travels. An
atomic group is never split: a group that is larger than a bucket gets a bucket of its own size. The trailer names the
transfer, the policy version, the bucket's number and its bytes, and carries a digest of them all.

**What the digest can see.** Each bucket is a matrix of 64-bit words, 512 a row. Sums of rows and of columns (modulo
2⁶⁴) go through a bijective mixer with their place and the trailer's fields as key, and are added up to two 64-bit
words. Any change within one word and any swap of two different words changes a sum for certain, and the digest but for
one chance in 2⁶⁴; so do lost, stale, shifted or swapped pieces unless their sums happen to be equal. Not seen: changes
that leave every row sum and every column sum as it was (four words at the corners of a rectangle moved by +d, −d, −d,
+d; two rows of equal sum swapped), which no torn copy makes, but a forger could: this guards against faults, not
against attackers. It runs at the speed of memory, where a cryptographic hash of the standard library would take several
times as long as the transfer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from lockstep.numerics.row_sums import GOLDEN, ROW_BYTES, WORD, RowSums, kernel, mix
from lockstep.records import Manifest, TensorSpec

ALIGNMENT = 256
"""Of tensors in a bucket: what CUDA allocations guarantee, and enough for every vector load."""

TRAILER_BYTES = 64
_MAGIC = b"LKSBKT01"
_TRAILER = struct.Struct("<8sqqqqQQ8x")  # magic, transfer, version, number, bytes, two words of digest


class TransferError(RuntimeError):
    """Bytes of a refit that are lost, doubled, out of order, cut, changed, or not those that were announced."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in its bucket."""

    spec: TensorSpec
    offset: int
    num_bytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in a bucket's buffer (flat uint8): a view, no copy."""
        part = buffer[self.offset : self.offset + self.num_bytes]
        return part.view(dtype_of(self.spec)).view(self.spec.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket's layout. ``num_bytes`` without the trailer, a multiple of a digest's row."""

    number: int
    slots: tuple[Slot, ...]
    num_bytes: int


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The torch dtype of a manifest's word. Raises TransferError where torch has none."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TransferError(f"{spec.name}: torch has no dtype {spec.dtype!r}")
    return dtype


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> tuple[Bucket, ...]:
    """The manifest's tensors in order, in as few buckets of at most ``bucket_bytes`` as keep atomic groups whole."""
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for unit in _units(manifest.tensors):
        sizes = [_num_bytes(spec) for spec in unit]
        if slots and _aligned(end, ALIGNMENT) + _span(sizes) > bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(slots), _aligned(end, ROW_BYTES)))
            slots, end = [], 0
        for spec, num_bytes in zip(unit, sizes, strict=True):
            offset = _aligned(end, ALIGNMENT)
            slots.append(Slot(spec, offset, num_bytes))
            end = offset + num_bytes
    if slots:
        buckets.append(Bucket(len(buckets), tuple(slots), _aligned(end, ROW_BYTES)))
    return tuple(buckets)


def _units(specs: tuple[TensorSpec, ...]) -> Iterator[tuple[TensorSpec, ...]]:
    """Runs of tensors that stay together: from the first member of a group to its last, overlapping runs as one."""
    last = {spec.group: index for index, spec in enumerate(specs)}
    start = end = 0
    for index, spec in enumerate(specs):
        if index > end:
            yield specs[start:index]
            start = index
        end = max(end, index, last[spec.group])
    if specs:
        yield specs[start:]


def _num_bytes(spec: TensorSpec) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    return count * dtype_of(spec).itemsize


def _aligned(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _span(sizes: list[int]) -> int:
    end = 0
    for num_bytes in sizes:
        end = _aligned(end, ALIGNMENT) + num_bytes
    return end


class Filler:
    """Lays a source's tensors into buckets, in the manifest's order, each checked against the manifest.

    Raises TransferError by name for a tensor that is missing, extra, out of order, ill-shaped or ill-typed.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = iter(tensors)

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> RowSums:
        """Copy the bucket's tensors into ``buffer``; what lies between them becomes zero. Returns the sums that its
        digest is made of: on a CPU they are taken of what is read, so they cost no second pass through memory, and a
        byte that changes on its way into the buffer is noticed."""
        end, sums = 0, None if buffer.is_cuda or kernel() is None else RowSums(bucket.num_bytes)
        for slot in bucket.slots:
            tensor = self._next(slot.spec)
            buffer[end : slot.offset] = 0
            end = slot.offset + slot.num_bytes
            _lay(tensor, slot, buffer, sums)
        buffer[end : bucket.num_bytes] = 0
        return RowSums.of(buffer[: bucket.num_bytes]) if sums is None else sums

    def _next(self, spec: TensorSpec) -> torch.Tensor:
        name, tensor = next(self._tensors, (None, None))
        if name is None or tensor is None:
            raise TransferError(f"missing: the source ended before {spec.name}")
        if name != spec.name:
            raise TransferError(f"the source brought {name} where its manifest has {spec.name}")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != dtype_of(spec):
            raise TransferError(
                f"{name} came as {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}, "
                f"its manifest says {spec.dtype} {spec.shape}"
            )
        return tensor.detach()

    def finish(self) -> None:
        """Raises TransferError if the source has more than its manifest says."""
        name, _ = next(self._tensors, (None, None))
        if name is not None:
            raise TransferError(f"extra: the source brought {name}, which is not in its manifest")


def _lay(tensor: torch.Tensor, slot: Slot, buffer: torch.Tensor, sums: RowSums | None) -> None:
    """Copy a tensor to its slot and take its sums."""
    part = buffer[slot.offset : slot.offset + slot.num_bytes]
    if tensor.is_contiguous():
        data = tensor.reshape(-1).view(torch.uint8)  # as bytes: float8 and e8m0 have no copy kernel everywhere
        if sums is not None and not data.is_cuda:
            sums.take(data, slot.offset, part)
            return
        part.copy_(data)
    else:
        slot.view(buffer).copy_(tensor)
    if sums is not None:
        sums.take(part, slot.offset, None)


# --- trailers and digests ---------------------------------------------------------------------------------------------


def seal(bucket: Bucket, buffer: torch.Tensor, *, transfer: int, version: int, sums: RowSums | None = None) -> str:
    """Write the trailer behind the bucket's bytes. Returns the digest. ``sums``: what ``Filler.fill`` returned of these
    very bytes."""
    words = _digest(buffer[: bucket.num_bytes], transfer, version, bucket.number, sums)
    packed = _TRAILER.pack(_MAGIC, transfer, version, bucket.number, bucket.num_bytes, *words)
    data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    buffer[bucket.num_bytes : bucket.num_bytes + TRAILER_BYTES].copy_(data)
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)  # another process reads it as soon as it hears of this
    return _text(words)


def content(bucket: Bucket, buffer: torch.Tensor, sums: RowSums) -> str:
    """The digest of the bucket's bytes alone, equal from transfer to transfer if they are: ``sums`` as for ``seal``."""
    return _text(_digest(buffer[: bucket.num_bytes], 0, 0, bucket.number, sums))


def check_seal(bucket: Bucket, buffer: torch.Tensor, *, transfer: int, version: int) -> str:
    """Compare trailer and bytes with what this bucket of this transfer must be. Returns the digest of this end.

    Raises TransferError naming what differs.
    """
    data = bytes(buffer[bucket.num_bytes : bucket.num_bytes + TRAILER_BYTES].cpu().numpy())
    if len(data) < TRAILER_BYTES:
        raise TransferError(f"bucket {bucket.number} is cut: its buffer ends before the trailer")
    magic, *found, first, second = _TRAILER.unpack(data)
    if magic != _MAGIC:
        raise TransferError(f"bucket {bucket.number} has no trailer after its {bucket.num_bytes} bytes: cut or torn")
    expected = (transfer, version, bucket.number, bucket.num_bytes)
    for word, had, wanted in zip(("transfer", "version", "number", "bytes"), found, expected, strict=True):
        if had != wanted:
            raise TransferError(f"bucket {bucket.number}: its trailer says {word} {had}, expected {wanted}")
    words = _digest(buffer[: bucket.num_bytes], transfer, version, bucket.number)
    if words != (first, second):
        raise TransferError(
            f"bucket {bucket.number} is corrupt: its digest is {_text(words)}, not {_text((first, second))} as it says"
        )
    return _text(words)


def fold(digests: Iterable[str]) -> str:
    """One digest of many, in their order."""
    first = second = 0
    for digest in digests:
        first = mix(mix(first + GOLDEN & WORD) ^ int(digest[:16], 16))
        second = mix(mix(second + GOLDEN & WORD) ^ int(digest[16:], 16))
    return _text((first, second))


def _digest(
    data: torch.Tensor, transfer: int, version: int, number: int, sums: RowSums | None = None
) -> tuple[int, int]:
    """Two words over ``data`` (flat uint8, a multiple of a row long)."""
    key = 0
    for part in (transfer, version, number, len(data)):
        key = mix(key + GOLDEN + part & WORD)
    return (sums or RowSums.of(data)).mixed(key)


def _text(words: tuple[int, int]) -> str:
    return f"{words[0]:016x}{words[1]:016x}"
