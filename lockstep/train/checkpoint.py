"""Saving and loading named tensors with torch's distributed checkpoint (DCP), refusing any disagreement beforehand.

DCP alone plans a load from the target's keys: what the checkpoint has beyond them is dropped in silence, and dtypes are
converted. Here both directions, shapes and dtypes are compared first, and every problem is named, before a byte of the
target changes. The folder is written in place: writing beside and renaming is the caller's.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class TrainerStateError(RuntimeError):
    """A checkpoint that does not fit, with everything that is wrong."""


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write ``tensors`` as a DCP folder at ``path``, flushed to the disk. Errors of the file system come through."""
    writer = _Writer(path, sync_files=True, single_file_per_rank=True)
    with _plain_errors():
        save(dict(tensors), storage_writer=writer, no_dist=_no_dist())


def load_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill ``tensors`` in place from ``path``. Raises TrainerStateError, before anything changes, on any difference."""
    problems = _differences(path, tensors)
    if problems:
        shown = "\n  ".join(problems[:20])
        more = f"\n  … and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise TrainerStateError(f"checkpoint {path} does not fit this trainer; nothing was loaded:\n  {shown}{more}")
    with _plain_errors():
        load(dict(tensors), storage_reader=FileSystemReader(path), no_dist=_no_dist())


class _Writer(FileSystemWriter):
    """When a write fails, torch.save's clean-up finds its archive cut short and raises a RuntimeError about that
    (``inline_container.cc: unexpected pos``) in place of the file system's error: raise the latter. This happens on the
    rank itself, because an error loses its context on the way to the other ranks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = _file_system_error_behind(error)
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, cause.filename) from error


def _file_system_error_behind(error: BaseException) -> OSError | None:
    """The OSError in whose handling ``error`` came up, directly or not; None if there is none."""
    todo, seen = [error], set[int]()
    while todo:
        found = todo.pop()
        if isinstance(found, OSError):
            return found
        seen.add(id(found))
        todo += [e for e in (found.__context__, found.__cause__) if e is not None and id(e) not in seen]
    return None


def _no_dist() -> bool:
    return not torch.distributed.is_initialized()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """DCP collects what ranks raise in a CheckpointException, which is no Exception and hides a full disk from any
    handler: raise the first rank's own error instead. Its warning that one process saves alone is left out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),  # looks a layout's name up in a table
    ("torch", "Size"),
    *(
        ("torch", name)
        for name in ("float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
    ),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """DCP's ``.metadata`` is a pickle, and a checkpoint may come from anywhere: only the classes that DCP writes for
    plain tensors are built, everything else is refused before it runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA_CLASSES:
            raise TrainerStateError(f"its .metadata names {module}.{name}, which no checkpoint of Lockstep contains")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """The ``.metadata`` of a DCP folder, built from the classes that DCP writes for plain tensors and no other. Raises
    TrainerStateError if there is none, or if it names anything else."""
    if not (path / ".metadata").is_file():
        raise TrainerStateError(f"checkpoint {path} is not complete: it has no .metadata file")
    with (path / ".metadata").open("rb") as file:
        try:
            return _MetadataUnpickler(file).load()
        except TrainerStateError as error:
            raise TrainerStateError(f"checkpoint {path} is refused: {error}") from None


def _differences(path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    stored = read_metadata(path).state_dict_metadata
    problems = [f"missing in the checkpoint: {key}" for key in sorted(tensors.keys() - stored.keys())]
    problems += [f"unknown to this trainer: {key}" for key in sorted(stored.keys() - tensors.keys())]
    for key in sorted(stored.keys() & tensors.keys()):
        entry, tensor = stored[key], tensors[key]
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{key}: not a tensor in the checkpoint")
        elif tuple(entry.size) != tuple(tensor.shape):
            problems.append(f"{key}: shape {tuple(entry.size)} in the checkpoint, {tuple(tensor.shape)} here")
        elif entry.properties.dtype != tensor.dtype:
            problems.append(f"{key}: {entry.properties.dtype} in the checkpoint, {tensor.dtype} here")
    return problems
