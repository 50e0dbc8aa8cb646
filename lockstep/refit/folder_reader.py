"""The receiving end of transport ``disk``: one bucket's file after the other, each checked before it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.records import Manifest
from lockstep.refit.buckets import TRAILER_BYTES, Bucket, Filler, Slot, TransferError, dtype_of, seal

MANIFEST = "manifest.json"


def travelling(slot: Slot, buffer: torch.Tensor) -> torch.Tensor:
    """The tensor in a bucket's buffer as it lies in a file: types of one byte as uint8."""
    view = slot.view(buffer)
    return view.view(torch.uint8) if view.element_size() == 1 else view


def bucket_file(folder: Path, bucket: Bucket) -> Path:
    """Where a bucket lies in a transfer's folder."""
    return folder / f"bucket-{bucket.number:05d}.safetensors"


class FolderReader:
    """The other end: reads and checks one bucket's file after the other. Raises TransferError by name."""

    def __init__(self, folder: Path, manifest: Manifest, plan: tuple[Bucket, ...], transfer_id: int) -> None:
        self._folder, self._version, self._transfer_id = folder, manifest.version, transfer_id
        try:
            described = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            found, self._digests = described["transfer"], described["digests"]
        except (OSError, ValueError, KeyError) as error:
            raise TransferError(f"{folder / MANIFEST} can't be read: {error}") from error
        if found != transfer_id or len(self._digests) != len(plan):
            raise TransferError(
                f"{folder} holds {len(self._digests)} buckets of transfer {found}, not {len(plan)} of {transfer_id}"
            )
        capacity = max((bucket.num_bytes for bucket in plan), default=0) + TRAILER_BYTES
        self._buffer = torch.empty(capacity, dtype=torch.uint8)

    def __call__(self, bucket: Bucket, _message: dict[str, Any]) -> tuple[torch.Tensor, str]:
        """A buffer with the bucket's tensors, and their digest."""
        path = bucket_file(self._folder, bucket)
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        except (OSError, SafetensorError) as error:
            raise TransferError(f"bucket {bucket.number} can't be read from {path}: {error}") from error
        names = {slot.spec.name for slot in bucket.slots}
        if tensors.keys() != names:
            missing, extra = sorted(names - tensors.keys()), sorted(tensors.keys() - names)
            raise TransferError(f"bucket {bucket.number}: {path} lacks {missing[:5]} and has beside them {extra[:5]}")
        Filler(self._as_specified(path, bucket, tensors)).fill(bucket, self._buffer)
        digest = seal(bucket, self._buffer, transfer=self._transfer_id, version=self._version)
        if digest != self._digests[bucket.number]:
            raise TransferError(
                f"bucket {bucket.number} is corrupt: {path} has digest {digest}, {MANIFEST} says "
                f"{self._digests[bucket.number]}"
            )
        return self._buffer, digest

    def _as_specified(
        self, path: Path, bucket: Bucket, tensors: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for slot in bucket.slots:
            name, tensor = slot.spec.name, tensors[slot.spec.name]
            if tensor.dtype != travelling(slot, self._buffer).dtype:
                raise TransferError(f"bucket {bucket.number}: {name} is {tensor.dtype} in {path}")
            yield name, tensor.view(dtype_of(slot.spec))
