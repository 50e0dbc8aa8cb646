"""The short way into vLLM's live weights, open after a whole load has been committed.

A layer-wise reload runs a Python loader per tensor, through staging buffers and the engine's post-processing. Where the
post-processing left every parameter in the layout that the loader wrote, all of that is a copy from known places to
known places: the dry run of ``vllm_plan`` has noted them. ``DirectCopy`` makes it so, straight into the storage that
captured graphs read, with as few kernel launches as torch can manage. It stays shut as soon as one layer is re-packed,
one tensor is computed on its way in, or one quantisation method is not known to leave weights alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lockstep.records import Original
from lockstep.rollout.vllm_coverage import Geometry
from lockstep.rollout.vllm_layout import LiveLayout

Piece = tuple[torch.Tensor, Geometry]
"""A view of live storage, and the part of the checkpoint's tensor that belongs there."""

TENSORS_PER_LAUNCH = 128
"""The GPU copies these while the next ones are looked up."""


class DirectCopy:
    """Copies checkpoint tensors into views of the live weights."""

    def __init__(self, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        self._pieces = pieces

    @classmethod
    def of(cls, layout: LiveLayout) -> DirectCopy | None:
        """For a model whose every weight can be written in place; None where one can't."""
        places = layout.places()
        return None if places is None else cls(places)

    def composed(self, originals: Mapping[str, Original]) -> DirectCopy | None:
        """The same for tensors that hold several of the checkpoint's each. What lies side by side at both ends is one
        copy: a stack of experts, and not each of them. None where one does not lie in its original in one piece."""
        regions = (region for original in originals.values() for _, region in original.parts)
        if not all(_is_dense(size, stride) for size, stride, _ in regions):
            return None
        return DirectCopy({
            name: _merged([
                (target, (size, stride, region[2] + offset))
                for part, region in original.parts
                for target, (size, stride, offset) in self._pieces[part]
            ])
            for name, original in originals.items()
        })  # fmt: skip

    def copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy all of them; they may be given up when the GPU has done so."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, tensor in tensors:
            for target, geometry in self._pieces[name]:
                targets.append(target)
                sources.append(_source(tensor, geometry))
            if len(targets) >= TENSORS_PER_LAUNCH:
                torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
                targets, sources = [], []
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _source(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The part of a checkpoint's tensor: geometries are those of contiguous ones."""
    size, stride, offset = geometry
    if offset == 0 and tensor.shape == size and tensor.stride() == stride and tensor.is_contiguous():
        return tensor  # a transposed one has the strides of a loader that transposes, which must do so nevertheless
    whole = tensor if tensor.is_contiguous() else tensor.contiguous()
    return whole.as_strided(size, stride, whole.storage_offset() + offset)


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Pieces of one tensor, in which runs that go on at both ends are one flat piece."""
    merged: list[Piece] = []
    for piece in sorted(pieces, key=lambda one: one[1][2]):
        if merged and (both := _joined(merged[-1], piece)) is not None:
            merged[-1] = both
        else:
            merged.append(piece)
    return tuple(merged)


def _joined(one: Piece, other: Piece) -> Piece | None:
    """Two pieces as one, if the second begins where the first ends, in the source and in one storage."""
    (target, (size, stride, offset)), (following, (size2, stride2, offset2)) = one, other
    count = target.numel()
    if target.untyped_storage().data_ptr() != following.untyped_storage().data_ptr():
        return None
    if not (_is_dense(size, stride) and _is_dense(size2, stride2)):
        return None
    if not (target.is_contiguous() and following.is_contiguous()) or target.dtype != following.dtype:
        return None
    start = target.storage_offset()
    if offset2 != offset + count or following.storage_offset() != start + count:
        return None
    both = (count + following.numel(),)
    return target.as_strided(both, (1,), start), (both, (1,), offset)


def _is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return torch.empty(size, device="meta").stride() == tuple(stride)
