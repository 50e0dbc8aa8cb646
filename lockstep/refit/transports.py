"""How the bytes of a refit travel. One class a transport, all passing the same contract tests.

| name | between | how |
|---|---|---|
| ``local`` | the same process | one copy into the engine's own storage |
| ``shared`` | the same process | the engine's parameters become aliases of the trainer's live storage; there is no second copy to fall back on, so the receipt names it |
| ``shm`` | processes of one machine | buckets in shared memory, two in flight, a digest each (``pipeline``, ``shm``) |
| ``disk`` | machines that see one folder | a folder of safetensors, written beside and renamed (``disk``) |
| ``cuda_ipc`` | processes on one GPU or its peers | as ``shm``, in GPU memory (``cuda_ipc``) |
"""  # noqa: E501  rows of a table

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch

from lockstep.config.schema import RefitConfig
from lockstep.interfaces import WeightReceiver, WeightSource
from lockstep.records import Claim, Original
from lockstep.refit.cuda_ipc import CudaBuffer
from lockstep.refit.disk import DiskTransport
from lockstep.refit.pipeline import BucketTransport
from lockstep.refit.shm import SharedBuffer
from lockstep.refit.transfer import Transfer, Transport, whole_tensors

__all__ = [
    "LocalTransport",
    "SharedTransport",
    "Transfer",
    "Transport",
    "TransportName",
    "make_transport",
    "whole_tensors",
]

TransportName = Literal["local", "shared", "shm", "disk", "cuda_ipc"]


class LocalTransport:
    """One copy within the process."""

    name = "local"

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> Transfer:
        """Copy all tensors. They have been copied when this returns, on a GPU too: a trainer may write to them again,
        and the time of this phase is that of the copies."""
        num_bytes = _originals_into(receiver, source)
        if num_bytes is None:
            counter = _ByteCounter()
            receiver.receive(counter.counted(whole_tensors(source)))
            num_bytes = counter.num_bytes
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return Transfer(num_bytes, 0, _no_wire(self.name))

    def close(self) -> None:
        """Nothing is kept."""


class SharedTransport:
    """No copy: the engine aliases the trainer's live weights."""

    name = "shared"

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> Transfer:
        """Alias all tensors: nothing moves."""
        receiver.alias(whole_tensors(source))
        return Transfer(0, 0, _no_wire(self.name))

    def close(self) -> None:
        """Nothing is kept."""


def make_transport(name: TransportName, settings: RefitConfig | None = None) -> Transport:
    """The transport of a configuration's name. Raises ValueError for ``disk`` without ``settings.folder``."""
    settings = settings or RefitConfig()
    sizes = {"bucket_bytes": settings.bucket_bytes, "timeout_s": settings.timeout_s}
    if name == "local":
        return LocalTransport()
    if name == "shared":
        return SharedTransport()
    if name == "disk":
        if settings.folder is None:
            raise ValueError("transport disk needs a folder that trainer and engine both see: refit.folder")
        return DiskTransport(Path(settings.folder), **sizes)
    return BucketTransport(name, SharedBuffer.create if name == "shm" else CudaBuffer.create, **sizes)


def _no_wire(transport: str) -> Claim:
    return Claim("transported", "not checked", f"transport {transport} stays within the process: there is no wire")


@runtime_checkable
class _Translated(Protocol):
    def originals(self) -> tuple[WeightSource, Mapping[str, Original]] | None: ...


@runtime_checkable
class _TakesOriginals(Protocol):
    def receive_originals(self, source: WeightSource, originals: Mapping[str, Original]) -> int | None: ...


def _originals_into(receiver: WeightReceiver, source: WeightSource) -> int | None:
    """The bytes of a source whose tensors went in under the names that they had before they were translated; None if
    one of the ends can't."""
    if not isinstance(source, _Translated) or not isinstance(receiver, _TakesOriginals):
        return None
    found = source.originals()
    return None if found is None else receiver.receive_originals(*found)


class _ByteCounter:
    def __init__(self) -> None:
        self.num_bytes = 0

    def counted(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.num_bytes += tensor.nbytes
            yield name, tensor
