"""Transport ``cuda_ipc``: buckets in GPU memory, one handle each, between two processes on the same GPU or its peers.

The handles are CUDA's, as torch makes them for its own multiprocessing. The sender's allocation must not be of
expandable segments, which classic handles can't name (a start with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``
is refused by name). Seen on one H200 with vLLM 0.24 in the second process: digests of both ends equal, live bytes equal
(``benchmarks/refit_gpu.py``); between two GPUs it was not tried. What a CPU can check is tested.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.refit.buckets import TransferError

_BYTES = "base64:"


@dataclass(slots=True)
class CudaBuffer:
    """GPU memory of ``num_bytes`` that another process can open."""

    tensor: torch.Tensor
    num_bytes: int

    @classmethod
    def create(cls, num_bytes: int) -> CudaBuffer:
        """Allocate it on the current GPU. Raises TransferError without one, or if its allocator has no handles."""
        if not torch.cuda.is_available():
            raise TransferError("transport cuda_ipc needs a GPU that torch can use; use shm")
        if "expandable_segments:true" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").lower():
            raise TransferError("transport cuda_ipc can't share memory of expandable segments: turn them off")
        return cls(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"), num_bytes)

    def describe(self) -> dict[str, Any]:
        """The handle, after everything that was queued has been written."""
        torch.cuda.synchronize()
        return {"handle": pack_handle(self.tensor.untyped_storage()._share_cuda_()), "num_bytes": self.num_bytes}

    def close(self) -> None:
        """Nothing to do: the memory goes back when the receiver has let go and ``tensor`` is no longer used."""


def attach(described: dict[str, Any]) -> torch.Tensor:
    """Open another process' GPU memory: flat uint8. Raises TransferError if CUDA refuses the handle."""
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*unpack_handle(described["handle"]))
    except RuntimeError as error:
        raise TransferError(f"CUDA can't open the sender's memory: {error}") from error
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole[: described["num_bytes"]]


def pack_handle(handle: tuple[Any, ...]) -> list[Any]:
    """torch's handle, a tuple of numbers, booleans and bytes, as JSON data."""
    return [_BYTES + base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in handle]


def unpack_handle(packed: list[Any]) -> tuple[Any, ...]:
    """The inverse of ``pack_handle``."""
    return tuple(
        base64.b64decode(part.removeprefix(_BYTES)) if isinstance(part, str) and part.startswith(_BYTES) else part
        for part in packed
    )
