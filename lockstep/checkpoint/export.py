"""A model in memory as a folder under the names in which its family is published: what engines' loaders read.

transformers' ``save_pretrained`` writes module names where it knows no way back (DeepSeek-V4); here the refit's table
translates, as for an engine, and a family without a table is refused. The folder appears whole or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.progress import Silent
from lockstep.checkpoint.records import CheckpointIndex, OutputGroup, OutputTensor, TensorEntry
from lockstep.checkpoint.streaming import folder_jobs
from lockstep.checkpoint.tensors import DTYPE_WORDS, OpenFiles, num_bytes
from lockstep.checkpoint.work_list import WorkList
from lockstep.checkpoint.writer import run_jobs
from lockstep.durable import rename_durably
from lockstep.interfaces import WeightSource
from lockstep.refit.names import as_checkpoint, families
from lockstep.refit.transports import whole_tensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

FILE_BYTES = 4 * 2**30
_WITH_TOWERS_ONLY = ("inkling_text",)
"""Families that are published with towers: no loader takes their names for the language model alone."""


def has_published_names(model: PreTrainedModel) -> bool:
    """Whether loaders take this model under the names in which its family is published."""
    model_type = model.config.get_text_config().model_type
    return model_type in families() and model_type not in _WITH_TOWERS_ONLY


@dataclass(frozen=True)
class _Export:
    """Tensors as they are, under their own names."""

    model_config: Mapping[str, Any]
    name: str = field(default="export", init=False)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {}

    def config(self, source: CheckpointIndex) -> dict[str, Any]:
        del source
        return dict(self.model_config)

    def outputs(self, source: CheckpointIndex) -> Sequence[OutputGroup]:
        return [
            OutputGroup((OutputTensor(entry.name, entry.dtype, entry.shape, (entry.name,)),))
            for entry in source.tensors.values()
        ]

    def make(self, group: OutputGroup, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        return {tensor.name: read(tensor.name) for tensor in group.tensors}


def export_weights(weights: WeightSource, config: Mapping[str, Any], out: Path, file_bytes: int = FILE_BYTES) -> Path:
    """Write ``weights`` and ``config`` as the folder ``out``, which must not exist or be empty. Returns it.

    Tied tensors are written once, as published. Raises NameMapError for a family or a name without a table's row,
    CheckpointError where the disk is too small; ``out`` is not made then.
    """
    source = as_checkpoint(weights)
    tensors = {name: tensor.detach().cpu() for name, tensor in whole_tensors(source)}
    entries = {
        name: TensorEntry(name, word, tuple(tensor.shape), "", 0, num_bytes(word, tuple(tensor.shape)))
        for name, tensor in tensors.items()
        for word in (DTYPE_WORDS[tensor.dtype],)
    }
    partial = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        work = WorkList(partial)
        work.begin("export", {})
        index = CheckpointIndex(partial, config, entries)
        jobs = folder_jobs(_Export(config), index, tensors.__getitem__, OpenFiles(partial), file_bytes)
        run_jobs(partial / "model", "export", jobs, work, workers=1, progress=Silent())
        if out.exists():
            out.rmdir()
        rename_durably(partial / "model", out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out
