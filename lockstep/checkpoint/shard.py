"""From a Hugging Face folder to a distributed checkpoint of the trainer, chunk by chunk, without loading the model.

Written is what torch's DCP would write under FSDP: tensors in transformers' module names (stacks of experts), each cut
along its first dimension into as many chunks as ranks (``torch.chunk``'s sizes), a file a rank. Any number of ranks
loads it. Multi-token-prediction layers and towers are no part of the trainer's model and are left out by name.

    checkpoint names ─ refit.names.units_of ─▶ module tensors ─▶ chunks ─▶ __RANK_0.distcp … .metadata
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lockstep.checkpoint.convert import model_type_of
from lockstep.checkpoint.errors import CheckpointError, Problem
from lockstep.checkpoint.records import CheckpointIndex
from lockstep.checkpoint.tensors import TORCH_DTYPES, TensorReader, as_bytes, num_bytes
from lockstep.checkpoint.work_list import DoneFile, WorkList
from lockstep.checkpoint.writer import MIN_BUDGET_BYTES, ByteBudget, FileJob, Progress, Sink, run_jobs
from lockstep.records import TensorSpec
from lockstep.refit.name_tables import NameMapError
from lockstep.refit.names import Unit, units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

METADATA = ".metadata"
_OUTSIDE = {"deepseek_v4": r"mtp\.", "inkling_text": r"model\.(mtp|visual|audio)\."}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A tensor of the trainer's module, and how it is made: the ``member``-th output of a unit."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    unit: Unit
    member: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows ``start`` to ``stop`` of a tensor along its first dimension. A tensor without dimensions is one chunk."""

    tensor: ModuleTensor
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the chunk."""
        return (self.stop - self.start, *self.tensor.shape[1:]) if self.tensor.shape else ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunk."""
        return num_bytes(self.tensor.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """All tensors, and for each rank its chunks. ``left_out``: names that the trainer's model does not have."""

    tensors: tuple[ModuleTensor, ...]
    ranks: tuple[tuple[Chunk, ...], ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, source: CheckpointIndex, num_ranks: int) -> ShardPlan:
        """The plan for a folder of plain weights. Raises CheckpointError for quantised ones, and for names without a
        place in the family's table."""
        model_type = model_type_of(source.config)
        problems = [
            Problem("dtype that a trainer has not", f"{entry.name} is {entry.dtype}: dequantise the checkpoint first")
            for entry in source.tensors.values()
            if entry.dtype.startswith("F8") or entry.dtype not in TORCH_DTYPES
        ]
        if problems:
            raise CheckpointError(source.folder, problems)
        left_out = tuple(name for name in source.tensors if _is_outside(model_type, source.config, name))
        specs = tuple(
            TensorSpec(entry.name, entry.shape, str(TORCH_DTYPES[entry.dtype]).removeprefix("torch."), entry.name)
            for entry in source.tensors.values()
            if entry.name not in set(left_out)
        )
        try:
            units = units_of(model_type, specs, "module")
        except NameMapError as error:
            raise CheckpointError(source.folder, [str(error)]) from error
        tensors = tuple(
            ModuleTensor(spec.name, source.tensors[unit.inputs[0].name].dtype, spec.shape, unit, member)
            for unit in units
            for member, spec in enumerate(unit.outputs)
        )
        return cls(tensors, tuple(tuple(_chunks(tensors, rank, num_ranks)) for rank in range(num_ranks)), left_out)


def _is_outside(model_type: str, config: Mapping[str, Any], name: str) -> bool:
    if model_type in _OUTSIDE:
        return re.match(_OUTSIDE[model_type], name) is not None
    layer = _LAYER.match(name)
    layers = config.get("num_hidden_layers")
    return layer is not None and isinstance(layers, int) and int(layer[1]) >= layers


def _chunks(tensors: Sequence[ModuleTensor], rank: int, num_ranks: int) -> Iterator[Chunk]:
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.shape else 1
        step = -(-rows // num_ranks)
        start, stop = min(rank * step, rows), min((rank + 1) * step, rows)
        if start < stop:
            yield Chunk(tensor, start, stop)


def write_shards(
    folder: Path, plan: ShardPlan, reader: TensorReader, work: WorkList, *, workers: int, progress: Progress
) -> dict[str, DoneFile]:
    """Write the plan's files, resuming by digest. The stage ``shard`` of ``work`` must have been begun."""
    largest = max(2 * chunk.num_bytes for chunks in plan.ranks for chunk in chunks)
    budget = ByteBudget(max(MIN_BUDGET_BYTES, largest))
    jobs = [_rank_job(rank, chunks, reader, budget) for rank, chunks in enumerate(plan.ranks)]
    whole = hashlib.sha256("".join(job.plan for job in jobs).encode()).hexdigest()

    def write_metadata(sink: Sink) -> dict[str, Any]:
        done = work.done("shard")
        sink.write(_metadata(plan, {job.name: done[job.name].details["chunks"] for job in jobs}), 0)
        return {}

    metadata = FileJob(METADATA, 1 << 12, whole, write_metadata, exact=False, last=True)
    return run_jobs(folder, "shard", [*jobs, metadata], work, workers=workers, progress=progress)


def _rank_job(rank: int, chunks: tuple[Chunk, ...], reader: TensorReader, budget: ByteBudget) -> FileJob:
    described = [
        [chunk.tensor.name, chunk.tensor.dtype, chunk.tensor.shape, chunk.start, chunk.stop] for chunk in chunks
    ]
    plan = hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def write(sink: Sink) -> dict[str, Any]:
        stream = _Stream(sink)
        places: list[list[int]] = []
        for chunk in chunks:
            begin = stream.position
            with budget.taken(2 * chunk.num_bytes):
                torch.save(read_chunk(chunk, reader), stream)  # pyright: ignore[reportArgumentType]
            places.append([begin, stream.position - begin])
        return {"chunks": places}

    size = sum(chunk.num_bytes for chunk in chunks)
    return FileJob(f"__{rank}_0.distcp", size, plan, write, exact=False)


class _Stream(io.RawIOBase):
    """What ``torch.save`` writes into: a sink that is filled from its beginning."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink
        self.position = 0

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._sink.write(view, self.position)
        self.position += len(view)
        return len(view)


def read_chunk(chunk: Chunk, reader: TensorReader) -> torch.Tensor:
    """One chunk, reading no more of the checkpoint than it needs."""
    tensor, unit = chunk.tensor, chunk.tensor.unit
    names = [spec.name for spec in unit.inputs]
    if not tensor.shape:
        return reader(names[0])
    if unit.row.layout == "same":
        return reader.rows(names[0], chunk.start, chunk.stop)
    if unit.row.layout == "experts":
        return _read_experts(chunk, reader, names)
    dim = unit.row.dim
    factor = 2 if dim == 0 else 1  # rows of gate and up alternate
    rows = reader.rows(names[0], factor * chunk.start, factor * chunk.stop)
    halves = rows.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return halves[tensor.member].contiguous() if len(unit.outputs) > 1 else torch.cat(halves, dim=dim)


def _read_experts(chunk: Chunk, reader: TensorReader, names: Sequence[str]) -> torch.Tensor:
    """Experts ``start`` to ``stop`` of a stack [E, parts · rows, …], each read into its place."""
    parts = len(chunk.tensor.unit.row.checkpoint)
    result = torch.empty(chunk.shape, dtype=TORCH_DTYPES[chunk.tensor.dtype])
    num_rows = chunk.shape[1] // parts
    for expert in range(chunk.start, chunk.stop):
        for part in range(parts):
            entry = reader.index.tensors[names[expert * parts + part]]
            place = result[expert - chunk.start, part * num_rows : (part + 1) * num_rows]
            reader.files.read_into(entry.file, entry.begin, as_bytes(place))
    return result


def _metadata(plan: ShardPlan, places: Mapping[str, Sequence[Sequence[int]]]) -> bytes:
    """DCP's ``.metadata`` (torch 2.13): every tensor's chunks, and where each lies."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {tensor.name: [] for tensor in plan.tensors}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for (file, found), own in zip(places.items(), plan.ranks, strict=True):
        for (offset, length), chunk in zip(found, own, strict=True):
            at = torch.Size((chunk.start, *(0 for _ in chunk.tensor.shape[1:]))) if chunk.tensor.shape else torch.Size()
            name = chunk.tensor.name
            storage[MetadataIndex(name, at, len(chunks[name]))] = _StorageInfo(file, offset, length)
            chunks[name].append(ChunkStorageMetadata(at, torch.Size(chunk.shape)))
    stored: dict[str, Any] = {
        tensor.name: TensorStorageMetadata(
            TensorProperties(TORCH_DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks[tensor.name]
        )
        for tensor in plan.tensors
    }
    return pickle.dumps(Metadata(stored, storage_data=storage, version="1.0.0"), protocol=4)


def load_shards(folder: Path, model: torch.nn.Module) -> None:
    """Fill a module, sharded over any number of ranks or whole, from a folder that ``write_shards`` made.

    A parameter that the module keeps in float32 (norms and hyper-connections of DeepSeek-V4) takes a narrower float
    exactly. Raises ``train.checkpoint.TrainerStateError``, before anything changes, if names, shapes or dtypes differ
    otherwise.
    """
    from lockstep.model.weights import ModelWeights
    from lockstep.train.checkpoint import load_tensors, read_metadata

    stored: Any = read_metadata(folder).state_dict_metadata
    live = {name: tensor for name, _, _, tensor in ModelWeights(model, 0).shards()}
    targets = dict(live)
    for name, tensor in live.items():
        dtype = stored[name].properties.dtype if name in stored else tensor.dtype
        if tensor.dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16):
            targets[name] = torch.empty_like(tensor, dtype=dtype)
    with torch.no_grad():
        load_tensors(folder, targets)
        for name, tensor in live.items():
            if targets[name] is not tensor:
                tensor.copy_(targets[name])
