"""The receiver's end of the transports: opens the sender's memory or files, checks each bucket, and loads it.

It runs in the engine's process. A bucket is handed to the receiver in one call, so an atomic group is never split over
two; it is checked whole before its first tensor is loaded. Buckets come in order, each once, and all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.interfaces import WeightReceiver
from lockstep.records import Manifest
from lockstep.refit import cuda_ipc, shm
from lockstep.refit.buckets import Bucket, TransferError, check_seal, fold, plan_buckets
from lockstep.refit.folder_reader import FolderReader

_ATTACH: dict[str, Callable[[dict[str, Any]], torch.Tensor]] = {"shm": shm.attach, "cuda_ipc": cuda_ipc.attach}

KEPT_BYTES = 256 << 20
"""Buffers up to this size are kept from one refit to the next, by both ends: to allocate them and to fault their pages
in takes as long as to fill them several times."""

Take = Callable[[Bucket, dict[str, Any]], tuple[torch.Tensor, str]]
"""From a bucket's layout and the message that announced it to its checked buffer and digest."""


@dataclass(slots=True)
class _Transfer:
    """One transfer as this end knows it."""

    plan: tuple[Bucket, ...]
    take: Take
    digests: list[str] = field(default_factory=list)


class Arrivals:
    """``rollout.engine_process.Inlet`` for every transport that crosses processes."""

    def __init__(self) -> None:
        self._transfer: _Transfer | None = None
        self._mapped: dict[str, torch.Tensor] = {}

    def handle(self, message: dict[str, Any], receiver: WeightReceiver, manifest: Manifest) -> dict[str, Any]:
        """Take one message of a sender. Raises TransferError by name for whatever is not as announced."""
        kind = message["kind"]
        if kind == "wait":
            return {}  # the sender prepares: whoever counts its silence begins anew
        if kind == "open":
            return self._open(message, manifest)
        if self._transfer is None:
            raise TransferError(f"a {kind} arrived and no transfer is open")
        if kind == "bucket":
            return self._load(self._transfer, message, receiver)
        if kind == "close":
            return self._finish(self._transfer)
        raise TransferError(f"unknown message {kind!r} of a transfer")

    def refit_over(self) -> None:
        """See ``Inlet``."""
        self._transfer = None

    def close(self) -> None:
        """Let go of the sender's memory."""
        self._transfer = None
        self._mapped = {}

    def _open(self, message: dict[str, Any], manifest: Manifest) -> dict[str, Any]:
        if self._transfer is not None:
            raise TransferError("a transfer was opened while another is open")
        plan, transfer_id = plan_buckets(manifest, message["bucket_bytes"]), message["transfer"]
        if message["transport"] == "disk":
            take: Take = FolderReader(Path(message["path"]), manifest, plan, transfer_id)
        else:
            buffers = self._attached(message["transport"], message["buffers"])
            take = _MemoryReader(buffers, transfer_id, manifest.version)
        self._transfer = _Transfer(plan, take)
        return {}

    def _attached(self, transport: str, described: list[dict[str, Any]]) -> list[torch.Tensor]:
        """The sender's buffers. Shared memory that it kept from its last transfer is still mapped: to fault its pages
        in again takes as long as to copy from it. It is the same memory while this end holds it, because no other
        can get its inode."""
        if transport != "shm":
            return [_ATTACH[transport](one) for one in described]
        marks = [json.dumps(one, sort_keys=True) for one in described]
        self._mapped = {
            mark: self._mapped[mark] if mark in self._mapped else shm.attach(one)
            for mark, one in zip(marks, described, strict=True)
        }
        return [self._mapped[mark] for mark in marks]

    def _load(self, transfer: _Transfer, message: dict[str, Any], receiver: WeightReceiver) -> dict[str, Any]:
        number, due, count = message["number"], len(transfer.digests), len(transfer.plan)
        if number >= count:
            raise TransferError(f"bucket {number} is one too many: the manifest fills {count}")
        if number != due:
            what = "is doubled" if number < due else "is out of order, or those before it are lost"
            raise TransferError(f"bucket {number} {what}: bucket {due} of {count} is due")
        buffer, digest = transfer.take(transfer.plan[number], message)
        load_views(receiver, transfer.plan[number], buffer)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)  # the sender fills it again as soon as it hears of this
        transfer.digests.append(digest)
        return {"digest": digest}

    def _finish(self, transfer: _Transfer) -> dict[str, Any]:
        self._transfer = None
        if max(map(len, self._mapped.values()), default=0) > KEPT_BYTES:
            self._mapped = {}
        if len(transfer.digests) != len(transfer.plan):
            raise TransferError(f"the transfer ended after {len(transfer.digests)} of {len(transfer.plan)} buckets")
        return {"digest": fold(transfer.digests), "num_buckets": len(transfer.digests)}


@dataclass(frozen=True, slots=True)
class _MemoryReader:
    """Buckets in memory that the sender fills."""

    buffers: list[torch.Tensor]
    transfer_id: int
    version: int

    def __call__(self, bucket: Bucket, message: dict[str, Any]) -> tuple[torch.Tensor, str]:
        buffer = self.buffers[message["buffer"]]
        return buffer, check_seal(bucket, buffer, transfer=self.transfer_id, version=self.version)


def load_views(receiver: WeightReceiver, bucket: Bucket, buffer: torch.Tensor) -> None:
    """Give a bucket's tensors to the receiver, as views that last for this call only.

    Raises TransferError if the receiver keeps one: the next bucket would change it behind its back.
    """

    def views() -> Iterator[tuple[str, torch.Tensor]]:
        for slot in bucket.slots:
            yield slot.spec.name, slot.view(buffer)

    before = _num_uses(buffer)
    receiver.receive(views())
    if _num_uses(buffer) > before:
        raise TransferError(
            f"the engine's receiver kept views of bucket {bucket.number} after its load call; "
            "the next bucket would overwrite them: it must copy what it keeps"
        )


def _num_uses(buffer: torch.Tensor) -> int:
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)
