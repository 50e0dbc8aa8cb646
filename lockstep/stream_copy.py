"""A copy of large CPU tensors that writes past the caches: weights that arrive are read much later, not from there.

An ordinary store fetches each line of the target before it overwrites it: half as much memory traffic again. Two
processes that share one memory notice.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lockstep.native import NoKernel, load_kernel

_LEAST_BYTES = 1 << 20
"""What is smaller may well be read again soon, from a cache."""


def stream_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``; past the caches if both are large, contiguous, on the CPU and of one type."""
    if (
        target.nbytes >= _LEAST_BYTES
        and target.dtype == source.dtype
        and target.shape == source.shape
        and target.device.type == source.device.type == "cpu"
        and target.is_contiguous()
        and source.is_contiguous()
        and (kernel := _kernel()) is not None
    ):
        kernel.stream_copy(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


@cache
def _kernel() -> Any:
    """The compiled ``stream_copy.c``; None where it can't be had or does not copy."""
    try:
        library = load_kernel(Path(__file__).with_suffix(".c"))
    except NoKernel:
        return None
    library.stream_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    library.stream_copy.restype = None
    source = torch.arange(2**18 + 300, dtype=torch.int32).view(torch.uint8)[3:-5]  # a piece of the kernel and more
    target = torch.zeros(len(source) + 2, dtype=torch.uint8)
    library.stream_copy(target[1:].data_ptr(), source.data_ptr(), len(source))
    return library if torch.equal(target[1:-1], source) and not target[0] and not target[-1] else None
