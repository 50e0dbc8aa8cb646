"""Transport ``shm``: buckets in shared memory of this machine, between the trainer's and the engine's process.

The memory is anonymous (``memfd_create``): the engine's process opens it through ``/proc/<pid>/fd`` while the sender
holds it. It has no name that could be left behind, so it is gone with the last process that maps it, however that ends;
and it does not count against the size of ``/dev/shm``, which containers keep at 64 MB. All of it is allocated before
the first byte is written: too little memory is an error there, never a signal in the middle of a copy.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.refit.buckets import TransferError

NAME_PREFIX = "lockstep-refit"
"""How these descriptors show in ``/proc/<pid>/fd``: ``/memfd:lockstep-refit-… (deleted)``."""


@dataclass(slots=True)
class SharedBuffer:
    """Memory of ``num_bytes`` that another process can map. ``close`` ends this process' hold on its descriptor; the
    mapping lasts as long as ``tensor`` or a view of it."""

    tensor: torch.Tensor
    num_bytes: int
    _descriptor: int

    @classmethod
    def create(cls, num_bytes: int) -> SharedBuffer:
        """Allocate it. Raises TransferError if there is not that much shared memory."""
        descriptor = os.memfd_create(f"{NAME_PREFIX}-{os.getpid()}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(_mapped(f"/proc/self/fd/{descriptor}", num_bytes), num_bytes, descriptor)
        except (OSError, RuntimeError) as error:
            os.close(descriptor)
            code = error.errno if isinstance(error, OSError) else None
            hint = "; use a smaller refit.bucket_bytes" if code in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG) else ""
            raise TransferError(f"no {num_bytes} bytes of shared memory for a bucket: {error}{hint}") from error

    def describe(self) -> dict[str, Any]:
        """What another process needs to map it, while this one holds it."""
        identity = os.fstat(self._descriptor)
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return {"path": path, "num_bytes": self.num_bytes, "inode": identity.st_ino, "device": identity.st_dev}

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)


def attach(described: dict[str, Any]) -> torch.Tensor:
    """Map another process' buffer: flat uint8. Raises TransferError if it is not there or not the one described."""
    path, num_bytes = described["path"], described["num_bytes"]
    try:
        found = os.stat(path)
    except OSError as error:
        raise TransferError(f"the sender's shared memory can't be opened: {error}") from error
    if (found.st_ino, found.st_dev) != (described["inode"], described["device"]):
        raise TransferError(f"{path} is not the shared memory that the sender described")
    if found.st_size < num_bytes:
        raise TransferError(f"the sender's shared memory is cut: {found.st_size} bytes instead of {num_bytes}")
    return _mapped(path, num_bytes)


def _mapped(path: str, num_bytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
