"""Running a ``Transform``: from its promise of outputs to the files of a folder, one group of tensors at a time.

outputs(source) ─▶ plan_files: groups by file, every offset known ─▶ per group: read sources, make, write, forget

Since shapes and dtypes are known beforehand, so are headers, sizes and offsets; a file's plan is the digest of its
header and of where each tensor comes from. Nothing is ever in memory but the groups that workers are at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.checkpoint.errors import CheckpointError, Problem
from lockstep.checkpoint.folder import INDEX, SINGLE, list_folder
from lockstep.checkpoint.records import CheckpointIndex, OutputGroup, OutputTensor, TensorEntry, Transform
from lockstep.checkpoint.tensors import DTYPE_WORDS, TORCH_DTYPES, OpenFiles, as_bytes, num_bytes
from lockstep.checkpoint.writer import MIN_BUDGET_BYTES, ByteBudget, FileJob, Sink, bytes_job

CONFIG = "config.json"
SIDE_FILES = (".json", ".jinja", ".txt", ".model", ".md")
"""Endings of what travels with the weights: tokenizer, template, generation settings, licence."""


Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One safetensors file to write. ``header`` has its length in front; ``offsets``: of each tensor in the file."""

    name: str
    groups: tuple[OutputGroup, ...]
    header: bytes
    offsets: dict[str, int]
    num_bytes: int


def plan_files(groups: Sequence[OutputGroup], file_bytes: int) -> tuple[PlannedFile, ...]:
    """Groups in files of at most ``file_bytes`` of data, a larger group alone in one. Raises CheckpointError for a name
    that is promised twice, or a dtype that can't be written."""
    _refuse_unwritable(groups)
    packs: list[list[OutputGroup]] = []
    room = 0
    for group in groups:
        size = sum(num_bytes(tensor.dtype, tensor.shape) for tensor in group.tensors)
        if not packs or size > room:
            packs.append([])
            room = file_bytes
        packs[-1].append(group)
        room -= size
    names = (
        [SINGLE]
        if len(packs) == 1
        else [f"model-{i + 1:05d}-of-{len(packs):05d}.safetensors" for i in range(len(packs))]
    )
    return tuple(_planned(name, tuple(pack)) for name, pack in zip(names, packs, strict=True))


def _refuse_unwritable(groups: Sequence[OutputGroup]) -> None:
    problems: list[Problem] = []
    seen: set[str] = set()
    for tensor in (tensor for group in groups for tensor in group.tensors):
        if tensor.name in seen:
            problems.append(Problem("tensor promised twice", tensor.name))
        if tensor.dtype not in TORCH_DTYPES:
            known = ", ".join(TORCH_DTYPES)
            problems.append(Problem("dtype that can't be written", f"{tensor.name} is {tensor.dtype}; known: {known}"))
        seen.add(tensor.name)
    if problems:
        raise CheckpointError("outputs", problems)


def _planned(name: str, groups: tuple[OutputGroup, ...]) -> PlannedFile:
    """The header. Tensors of wide elements come first, as safetensors' own writer has it: every one is aligned then."""
    tensors = [tensor for group in groups for tensor in group.tensors]
    tensors.sort(key=lambda tensor: -TORCH_DTYPES[tensor.dtype].itemsize)  # stable
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    position = 0
    for tensor in tensors:
        size = num_bytes(tensor.dtype, tensor.shape)
        begins[tensor.name] = position
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {tensor: len(header) + begin for tensor, begin in begins.items()}
    return PlannedFile(name, groups, header, offsets, len(header) + position)


def folder_jobs(
    transform: Transform, source: CheckpointIndex, read: Read, files: OpenFiles, file_bytes: int
) -> list[FileJob]:
    """Everything that a transform's folder holds: weights and side files, then index and ``config.json``, without which
    nobody takes the folder for a model.

    ``read`` and ``files`` give the source's tensors, and its files for what is copied verbatim.
    """
    planned = plan_files(transform.outputs(source), file_bytes)
    needs = [_memory_of(group, source) for file in planned for group in file.groups]
    budget = ByteBudget(max([MIN_BUDGET_BYTES, *needs]))
    jobs = [_weights_job(transform, source, file, read, files, budget) for file in planned]
    if len(planned) != 1:
        total = sum(file.num_bytes - len(file.header) for file in planned)
        weight_map = {name: file.name for file in planned for name in file.offsets}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        jobs.append(bytes_job(INDEX, (json.dumps(index, indent=1) + "\n").encode(), last=True))
    found: list[Problem] = []
    side_files = list_folder(source.folder, found)
    for name, path in side_files.others.items() if side_files else ():
        if name not in (CONFIG, INDEX) and name.endswith(SIDE_FILES):
            jobs.append(bytes_job(name, path.read_bytes()))
    config = json.dumps(transform.config(source), indent=2, ensure_ascii=False) + "\n"
    return [*jobs, bytes_job(CONFIG, config.encode(), last=True)]


def _weights_job(
    transform: Transform, source: CheckpointIndex, file: PlannedFile, read: Read, files: OpenFiles, budget: ByteBudget
) -> FileJob:
    sources = [[tensor.name, *tensor.sources] for group in file.groups for tensor in group.tensors]
    plan = hashlib.sha256(file.header + json.dumps(sources).encode()).hexdigest()

    def write(sink: Sink) -> dict[str, Any]:
        sink.write(file.header, 0)
        for group in file.groups:
            made = [tensor for tensor in group.tensors if not tensor.verbatim]
            for tensor in group.tensors:
                if tensor.verbatim:
                    entry = source.tensors[tensor.sources[0]]
                    sink.copy(files, entry.file, entry.begin, entry.end, file.offsets[tensor.name])
            if not made:
                continue
            with budget.taken(_memory_of(group, source)):
                results = _made(transform, group, made, read)
                for name in tuple(results):  # each is gone before the next group waits for memory
                    sink.write(as_bytes(results.pop(name)), file.offsets[name])
        return {}

    return FileJob(file.name, file.num_bytes, plan, write)


def _made(
    transform: Transform, group: OutputGroup, promised: Sequence[OutputTensor], read: Read
) -> dict[str, torch.Tensor]:
    """What ``make`` returns, which must be what ``outputs`` promised."""
    made = transform.make(group, read)
    wanted = {tensor.name: (tensor.dtype, tensor.shape) for tensor in promised}
    found = {name: (DTYPE_WORDS.get(tensor.dtype, ""), tuple(tensor.shape)) for name, tensor in made.items()}
    if wanted != found:
        raise CheckpointError(transform.name, [f"made {found} where {wanted} was promised"])
    return {name: tensor.contiguous() for name, tensor in made.items()}


def _memory_of(group: OutputGroup, source: CheckpointIndex) -> int:
    """Bytes of a group's sources and of what is made of them; verbatim copies need none."""
    made = [tensor for tensor in group.tensors if not tensor.verbatim]
    names = dict.fromkeys(name for tensor in made for name in tensor.sources)
    outputs = sum(num_bytes(tensor.dtype, tensor.shape) for tensor in made)
    return outputs + sum(source.tensors[name].end - source.tensors[name].begin for name in names)


def promised(transform: Transform, source: CheckpointIndex) -> CheckpointIndex:
    """The folder that a transform will write, as an index whose tensors have sizes and no bytes: what a later stage is
    planned on before anything is written."""
    tensors = {
        tensor.name: TensorEntry(
            tensor.name, tensor.dtype, tensor.shape, SINGLE, 0, num_bytes(tensor.dtype, tensor.shape)
        )
        for group in transform.outputs(source)
        for tensor in group.tensors
    }
    return CheckpointIndex(source.folder, transform.config(source), tensors)


def weights_bytes(index: CheckpointIndex) -> int:
    """Bytes of all tensors."""
    return sum(entry.end - entry.begin for entry in index.tensors.values())
