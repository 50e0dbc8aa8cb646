"""Saving and loading named tensors with torch's distributed checkpoint (DCP), refusing any disagreement beforehand.

DCP alone plans a load from the target's keys: what the checkpoint has beyond them is dropped in silence, and dtypes are
converted. Here both directions, shapes and dtypes are compared first, and every problem is named, before a byte of the
target changes. The folder is written in place: writing beside and renaming is the caller's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


class CheckpointError(RuntimeError):
    """A checkpoint that does not fit, with everything that is wrong."""


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write ``tensors`` as a DCP folder at ``path``, flushed to the disk. Errors of the file system come through."""
    writer = FileSystemWriter(path, sync_files=True, single_file_per_rank=True)
    save(dict(tensors), storage_writer=writer, no_dist=not torch.distributed.is_initialized())


def load_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill ``tensors`` in place from ``path``. Raises CheckpointError, before anything changes, on any difference."""
    problems = _differences(path, tensors)
    if problems:
        shown = "\n  ".join(problems[:20])
        more = f"\n  … and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"checkpoint {path} does not fit this trainer; nothing was loaded:\n  {shown}{more}")
    load(dict(tensors), storage_reader=FileSystemReader(path), no_dist=not torch.distributed.is_initialized())


def _differences(path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"checkpoint {path} is not complete: it has no .metadata file")
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
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
