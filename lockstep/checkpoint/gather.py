"""From a distributed checkpoint back to a Hugging Face folder under the names in which the model is published.

The way back from ``shard.py``, whoever wrote the checkpoint and on however many ranks: each module tensor is put
together from its chunks, cut into checkpoint tensors by the refit's name table, and written.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.convert import model_type_of
from lockstep.checkpoint.errors import CheckpointError, Problem
from lockstep.checkpoint.records import CheckpointIndex, OutputGroup, OutputTensor, TensorEntry
from lockstep.checkpoint.streaming import folder_jobs
from lockstep.checkpoint.tensors import DTYPE_WORDS, TORCH_DTYPES, OpenFiles, num_bytes
from lockstep.checkpoint.work_list import WorkList
from lockstep.checkpoint.writer import Progress, run_jobs
from lockstep.records import Manifest, TensorSpec
from lockstep.refit.name_tables import NameMapError
from lockstep.refit.names import Unit, as_checkpoint, units_of

if TYPE_CHECKING:
    import torch

_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class ShardReader:
    """Tensors of a DCP folder by name, put together from their chunks.

    Its ``.metadata`` is a pickle and is read through the trainer's allow-list. Raises TrainerStateError for anything
    else in it, and CheckpointError for a folder whose entries are no tensors, or don't cover them.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        from lockstep.train.checkpoint import read_metadata

        self.folder = folder
        self._metadata = read_metadata(folder)
        problems: list[Problem] = []
        self.entries: dict[str, TensorEntry] = {}
        for name, stored in self._metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata) or stored.properties.dtype not in DTYPE_WORDS:
                problems.append(Problem("no tensor", f"{name}: only tensors with a safetensors dtype can be written"))
                continue
            word, shape = DTYPE_WORDS[stored.properties.dtype], tuple(stored.size)
            covered = sum(_numel(tuple(chunk.sizes)) for chunk in stored.chunks)
            if covered != _numel(shape):
                text = f"{name}: its chunks have {covered} elements, the tensor {_numel(shape)}"
                problems.append(Problem("chunks don't cover a tensor", text))
            self.entries[name] = TensorEntry(name, word, shape, "", 0, num_bytes(word, shape))
        if problems:
            raise CheckpointError(folder, problems)

    def __call__(self, name: str) -> torch.Tensor:
        """A whole tensor. Raises CheckpointError for a chunk that is not what ``.metadata`` says."""
        import torch
        from torch.distributed.checkpoint.metadata import MetadataIndex

        stored: Any = self._metadata.state_dict_metadata[name]
        result = torch.empty(stored.size, dtype=stored.properties.dtype)
        for number, chunk in enumerate(stored.chunks):
            place = self._metadata.storage_data[MetadataIndex(name, chunk.offsets, number)]
            tensor = self._load(place)
            if tuple(tensor.shape) != tuple(chunk.sizes) or tensor.dtype != result.dtype:
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise CheckpointError(self.folder, [f"{name}: chunk {number} is {found}, not {tuple(chunk.sizes)}"])
            where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            result[where].copy_(tensor)
        return result

    def _load(self, place: Any) -> torch.Tensor:
        import torch
        from torch.distributed.checkpoint.utils import _create_file_view

        path = self.folder / place.relative_path
        if path.parent != self.folder:
            raise CheckpointError(self.folder, [f"its .metadata names a file outside the folder: {path}"])
        with path.open("rb") as file:
            view = _create_file_view(file, place.offset, place.length)
            return torch.load(view, map_location="cpu", weights_only=True)  # pyright: ignore[reportArgumentType]


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


@dataclass(frozen=True)
class Gather:
    """The stage that writes module tensors as a published checkpoint has them. ``model_config`` becomes config.json;
    rows of the vocabulary beyond its ``vocab_size``, which padding for some layout added, are cut off."""

    model_config: Mapping[str, Any]
    name: str = field(default="gather", init=False)

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the result depends on."""
        return {"config": dict(self.model_config)}

    def config(self, source: CheckpointIndex) -> dict[str, Any]:
        """The model's."""
        del source
        return dict(self.model_config)

    def outputs(self, source: CheckpointIndex) -> Sequence[OutputGroup]:
        """One group for each row of the table. Raises CheckpointError for names without a place in it."""
        specs = tuple(_spec(self._trimmed(entry)) for entry in source.tensors.values())
        try:
            units = units_of(model_type_of(self.model_config), specs, "checkpoint")
        except NameMapError as error:
            raise CheckpointError(source.folder, [str(error)]) from error
        return [self._group(source, unit) for unit in units]

    def make(self, group: OutputGroup, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of one row."""
        tensors = {name: self._cut(name, read(name)) for name in group.sources}
        relaid = as_checkpoint(_Tensors(model_type_of(self.model_config), tensors))
        return {name: tensor for name, _, _, tensor in relaid.shards()}

    def _group(self, source: CheckpointIndex, unit: Unit) -> OutputGroup:
        names = tuple(spec.name for spec in unit.inputs)
        word = source.tensors[names[0]].dtype
        return OutputGroup(tuple(OutputTensor(spec.name, word, spec.shape, names) for spec in unit.outputs))

    def _trimmed(self, entry: TensorEntry) -> TensorEntry:
        rows = self._rows(entry.name, entry.shape)
        return replace(entry, shape=(rows, *entry.shape[1:])) if entry.shape else entry

    def _cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: self._rows(name, tuple(tensor.shape))] if tensor.ndim else tensor

    def _rows(self, name: str, shape: tuple[int, ...]) -> int:
        text = self.model_config.get("text_config", self.model_config)
        vocabulary = text.get("vocab_size") if isinstance(text, Mapping) else None
        rows = shape[0] if shape else 0
        return min(rows, vocabulary) if name in _VOCABULARY and isinstance(vocabulary, int) else rows


def _spec(entry: TensorEntry) -> TensorSpec:
    dtype = str(TORCH_DTYPES[entry.dtype]).removeprefix("torch.")
    return TensorSpec(entry.name, entry.shape, dtype, entry.name)


class _Tensors:
    """A few tensors in module names as a weight source."""

    def __init__(self, model_type: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._model_type, self._tensors = model_type, tensors

    def manifest(self) -> Manifest:
        specs = tuple(
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), name)
            for name, tensor in self._tensors.items()
        )
        return Manifest(version=0, tensors=specs, model_type=self._model_type)

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, tuple(tensor.shape), (0,) * tensor.ndim, tensor


def gather_shards(
    shards: Path, config: Mapping[str, Any], out: Path, *, file_bytes: int, workers: int, progress: Progress
) -> Path:
    """Write a distributed checkpoint as the folder ``out``, with ``config`` as its config.json; resumes by digest from
    the work list beside it (``OUT.work``), which is removed at the end. Returns ``out``.

    Raises CheckpointError for names without a place in the family's table, and if ``out`` is there and was not begun
    by this.
    """
    beside = out.with_name(out.name + ".work")
    if out.exists() and any(out.iterdir()) and not beside.exists():
        raise CheckpointError(out, ["is not empty; choose a new folder"])
    beside.mkdir(parents=True, exist_ok=True)
    reader = ShardReader(shards)
    source = CheckpointIndex(shards, config, reader.entries)
    transform = Gather(config)
    work = WorkList(beside)
    metadata = hashlib.sha256((shards / ".metadata").read_bytes()).hexdigest()
    work.begin("gather", {"settings": dict(transform.settings), "metadata": metadata})
    jobs = folder_jobs(transform, source, reader, OpenFiles(shards), file_bytes)
    run_jobs(out, "gather", jobs, work, workers=workers, progress=progress)
    shutil.rmtree(beside)
    return out
