"""Reading single tensors of a checkpoint folder by the offsets of its headers: one read, no mapping of the file.

A mapped file counts as the process' memory once it was touched, so that streaming through hundreds of gigabytes would
look like, and on a small machine be, a lack of memory. Here a tensor is read into memory of its own and is gone with
its last reference. Readers may be shared by threads.
"""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from types import TracebackType

import torch

from lockstep.checkpoint.errors import CheckpointError
from lockstep.checkpoint.records import CheckpointIndex, TensorEntry
from lockstep.checkpoint.strict_json import open_regular

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""safetensors' words, and torch's dtypes of one element each. Packed ones (F4) have no such dtype."""

DTYPE_WORDS = {dtype: word for word, dtype in TORCH_DTYPES.items()}


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a dtype in safetensors' words. KeyError for one without a torch dtype."""
    return math.prod(shape) * TORCH_DTYPES[dtype].itemsize


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, without a copy."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class OpenFiles:
    """Files of one folder, opened for reading when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from a file's byte ``offset`` on. Raises CheckpointError if the file ends before."""
        descriptor, done = self._descriptor(file), 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done : done + (1 << 30)]], offset + done)
            if count == 0:
                raise CheckpointError(
                    self._folder,
                    [f"{file} ends {len(target) - done} bytes before its tensors do: it was cut since it was opened"],
                )
            done += count

    def close(self) -> None:
        """Close them all."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = open_regular((self._folder / file).resolve())
            return self._descriptors[file]


class TensorReader:
    """Tensors of a folder by name, read when they are asked for."""

    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index
        self.files = OpenFiles(index.folder)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.files.close()

    def __call__(self, name: str) -> torch.Tensor:
        """A whole tensor, in memory of its own. KeyError for a name that is not there."""
        entry = self.index.tensors[name]
        result = torch.empty(entry.shape, dtype=self._dtype(entry))
        self.files.read_into(entry.file, entry.begin, as_bytes(result))
        return result

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """``tensor[start:stop]`` along the first dimension, reading no more than that."""
        entry = self.index.tensors[name]
        result = torch.empty((stop - start, *entry.shape[1:]), dtype=self._dtype(entry))
        row_bytes = num_bytes(entry.dtype, entry.shape[1:])
        self.files.read_into(entry.file, entry.begin + start * row_bytes, as_bytes(result))
        return result

    def _dtype(self, entry: TensorEntry) -> torch.dtype:
        if entry.dtype not in TORCH_DTYPES:
            known = ", ".join(TORCH_DTYPES)
            raise CheckpointError(
                self.index.folder, [f"{entry.name} is {entry.dtype}, which torch has no dtype for; known: {known}"]
            )
        return TORCH_DTYPES[entry.dtype]
