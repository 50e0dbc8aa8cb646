"""A checkpoint folder read without its weights: ``config.json``, the index, and every safetensors header.

    folder.py   what lies in the folder: names, links, pickles, code          ┐
    headers.py  index → files → headers → entries, each checked on its own    ┴→ CheckpointIndex, or every problem

The folder is untrusted. Nothing in it is executed or unpickled, no path leaves it, every read has a bound, and whoever
gets a ``CheckpointIndex`` may use its offsets as they are: they lie inside the file, cover it without gap or overlap,
and agree with shape and dtype. Format: https://github.com/huggingface/safetensors#format (8 bytes little-endian length,
that many bytes of JSON, then the data; offsets count from the data's start).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.errors import CheckpointError, Problem, shown
from lockstep.checkpoint.folder import INDEX, SINGLE, FolderFiles, list_folder
from lockstep.checkpoint.records import CheckpointIndex, TensorEntry
from lockstep.checkpoint.strict_json import JsonError, open_regular, parse_object, read_object

MAX_HEADER_BYTES = 32 << 20
"""About 300,000 tensors in one file. safetensors itself takes 100 MB, which Python parses into gigabytes."""
MAX_INDEX_BYTES = 64 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_TENSORS = 1_000_000
"""Of all files together. DeepSeek-V4-Pro has 145,116."""
MAX_NAME_CHARACTERS = 512
MAX_DIMS = 16

DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of an element, by safetensors' words (``Dtype`` of its ``tensor.rs``)."""


@dataclass(slots=True)
class Scan:
    """What could be read of a folder, and everything that was wrong. ``config`` is None if there is none to read."""

    folder: Path
    config: dict[str, Any] | None = None
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_checkpoint(folder: Path) -> CheckpointIndex:
    """A folder's configuration and tensors, from its headers. Raises CheckpointError with all problems."""
    scan = scan_checkpoint(folder)
    if scan.problems or scan.config is None:
        raise CheckpointError(folder, scan.problems)
    return CheckpointIndex(folder=scan.folder, config=scan.config, tensors=scan.tensors)


def scan_checkpoint(folder: Path) -> Scan:
    """Like ``read_checkpoint``, but hands over whatever could be read, with the problems beside it."""
    folder = Path(folder)
    scan = Scan(folder)
    files = list_folder(folder, scan.problems)
    if files is None:
        return scan
    scan.config = _json_file(files, "config.json", MAX_CONFIG_BYTES, scan.problems)
    index = _index(files, scan.problems)
    weight_map = _weight_map(index, scan.problems)
    named = files.weights.keys() if index is None else set(weight_map.values())
    headers: dict[str, dict[str, TensorEntry]] = {}
    for name, path in files.weights.items():
        if name in named:
            headers[name] = read_header(name, path, scan.problems)
        if sum(map(len, headers.values())) > MAX_TENSORS:
            scan.problems.append(Problem("too many tensors", f"more than {MAX_TENSORS}; no model has as many"))
            return scan
    _merge(headers, scan)
    if index is not None:
        _compare(weight_map, headers, files, scan.problems)
        _check_total(index, sum(path.stat().st_size for name, path in files.weights.items() if name in named), scan)
    return scan


def _json_file(files: FolderFiles, name: str, max_bytes: int, problems: list[Problem]) -> dict[str, Any] | None:
    path = files.others.get(name)
    if path is None:
        if name not in files.refused:
            problems.append(Problem("missing file", f"{name} is needed"))
        return None
    try:
        return read_object(path, max_bytes)
    except (JsonError, OSError) as error:
        problems.append(Problem(f"{name} is refused", str(error)))
        return None


def _index(files: FolderFiles, problems: list[Problem]) -> dict[str, Any] | None:
    """The index; None where there is none, and a single file speaks for itself."""
    if INDEX in files.others:
        return _json_file(files, INDEX, MAX_INDEX_BYTES, problems)
    if list(files.weights) != [SINGLE] and not any(name.endswith((".safetensors", INDEX)) for name in files.refused):
        found = f"{len(files.weights)} .safetensors files ({', '.join(map(shown, list(files.weights)[:3]))})"
        text = f"{found} and no {INDEX}: either it, or exactly one {SINGLE}, is needed"
        problems.append(Problem("missing file", text))
    return None


def _weight_map(index: Mapping[str, Any] | None, problems: list[Problem]) -> dict[str, str]:
    """Tensor to file as the index says, without the entries that are refused."""
    weight_map = {} if index is None else index.get("weight_map")
    if not isinstance(weight_map, dict) or (index is not None and not weight_map):
        problems.append(Problem(f"{INDEX} is refused", "weight_map must be an object of tensor names to file names"))
        return {}
    result: dict[str, str] = {}
    for name, file in weight_map.items():
        if isinstance(file, str) and _is_plain(file):
            result[name] = file
        else:
            text = f"{shown(name)} in {shown(file)}: must be a .safetensors file directly in the folder"
            problems.append(Problem("index names a file outside the folder", text))
    return result


def _is_plain(file: str) -> bool:
    """A file name without any way out of its folder."""
    return file.endswith(".safetensors") and file.isprintable() and os.path.basename(file) == file and "\\" not in file


def read_header(name: str, path: Path, problems: list[Problem]) -> dict[str, TensorEntry]:
    """The entries of one file whose own header is sound; everything else becomes a problem. ``name``: what the folder
    calls it, ``path``: where it lies."""
    found: list[Problem] = []
    entries: dict[str, TensorEntry] = {}
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            limit = min(MAX_HEADER_BYTES, size - 8)
            if size < 8 or length > limit:
                why = f"{size} bytes, of which the header would be {length}; at most {max(limit, 0)} can be"
                raise JsonError(f"truncated, or no safetensors file: {why}")
            data = file.read(length)
        if len(data) != length or not data.startswith(b"{"):
            raise JsonError("the header is no JSON object")
        header = parse_object(data)
    except (JsonError, OSError) as error:
        problems.append(Problem("header is refused", f"{shown(name)}: {error}"))
        return {}
    _check_metadata(name, header.pop("__metadata__", {}), found)
    for tensor, fields in header.items():
        entry = _entry(name, tensor, fields, 8 + length, size, found)
        if entry is not None:
            entries[tensor] = entry
    if not found:
        _check_coverage(name, entries, 8 + length, size, found)
    problems += found
    return entries


def _check_metadata(file: str, metadata: Any, problems: list[Problem]) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append(Problem("header is refused", f"{shown(file)}: __metadata__ must map text to text"))


def _entry(file: str, name: str, fields: Any, start: int, size: int, problems: list[Problem]) -> TensorEntry | None:
    """One entry with offsets in the file; None, and a problem, if anything about it is wrong."""

    def refuse(why: str) -> None:
        problems.append(Problem("header entry is refused", f"{shown(file)}: {shown(name)}: {why}"))

    if not name.isprintable() or not name or " " in name or len(name) > MAX_NAME_CHARACTERS:
        return refuse("a name has 1 to 512 printable characters without spaces")
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        return refuse("must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return refuse(f"dtype {shown(dtype)} is unknown; known: {', '.join(DTYPE_BITS)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        return refuse(f"shape {shown(shape)} is no list of at most {MAX_DIMS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        return refuse(f"data_offsets {shown(offsets)} are no pair of byte offsets")
    begin, end = offsets
    if not begin <= end <= size - start:
        return refuse(f"data_offsets {shown(offsets)} lie outside the file's {size - start} bytes of data")
    bits = _bits(dtype, shape)
    if bits != 8 * (end - begin):
        return refuse(f"{dtype} {shown(shape)} takes {shown(bits / 8)} bytes, not {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), file, start + begin, start + end)


def _bits(dtype: str, shape: Sequence[int]) -> int:
    """Bits of a tensor; no size of a real one needs more than 2^63."""
    return min(math.prod(shape) * DTYPE_BITS[dtype], 1 << 63)


def _are_sizes(value: Any) -> bool:
    """A list of integers from 0 to 2^63 - 1; ``True`` is none."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _check_coverage(file: str, entries: Mapping[str, TensorEntry], start: int, size: int, out: list[Problem]) -> None:
    """Tensors follow each other from the first byte of data to the last: no overlap, no gap, no tail."""
    position, last = start, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            what = "overlaps" if entry.begin < position else "leaves a gap after"
            text = f"{shown(file)}: {shown(entry.name)} begins at byte {entry.begin} and {what} {shown(last)}"
            out.append(Problem("offsets don't cover the file", f"{text}, which ends at {position}"))
        position, last = max(position, entry.end), entry.name
    if position != size:
        text = f"{shown(file)}: {size - position} bytes after the last tensor belong to none"
        out.append(Problem("offsets don't cover the file", text))


def _merge(headers: Mapping[str, Mapping[str, TensorEntry]], scan: Scan) -> None:
    for file, entries in headers.items():
        for name, entry in entries.items():
            if name in scan.tensors:
                text = f"{shown(name)} is in {shown(scan.tensors[name].file)} and in {shown(file)}"
                scan.problems.append(Problem("tensor in two files", text))
            else:
                scan.tensors[name] = entry


def _compare(
    weight_map: Mapping[str, str],
    headers: Mapping[str, Mapping[str, TensorEntry]],
    files: FolderFiles,
    problems: list[Problem],
) -> None:
    """Index and files agree, both ways."""
    problems += [
        Problem("missing file", f"{shown(file)} is named by {INDEX}")
        for file in dict.fromkeys(weight_map.values())
        if file not in headers and file not in files.refused
    ]
    problems += [
        Problem("file that no index names", f"{shown(file)}: remove it, or add its tensors to {INDEX}")
        for file in files.weights
        if file not in headers
    ]
    for name, file in weight_map.items():
        if file in headers and name not in headers[file]:
            text = f"{shown(name)} isn't in {shown(file)}, where {INDEX} has it"
            problems.append(Problem("index and files disagree", text))
    for file, entries in headers.items():
        for name in entries:
            if weight_map.get(name) != file:
                text = f"{shown(name)} is in {shown(file)}; {INDEX} has it in {shown(weight_map.get(name, 'no file'))}"
                problems.append(Problem("index and files disagree", text))


def _check_total(index: Mapping[str, Any], file_bytes: int, scan: Scan) -> None:
    """``metadata.total_size`` of the index, where it is given, is the sum of all tensors' bytes (transformers' way), or
    of the files with their headers (DeepSeek-V3's: 688,586,727,753, of which 688,574,839,360 are tensors)."""
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        scan.problems.append(Problem(f"{INDEX} is refused", "metadata must be an object"))
        return
    total = sum(entry.end - entry.begin for entry in scan.tensors.values())
    if "total_size" in metadata and metadata["total_size"] not in (total, file_bytes):
        stated = shown(metadata["total_size"])
        text = f"metadata.total_size is {stated}; the tensors have {total} bytes, their files {file_bytes}"
        scan.problems.append(Problem("sizes don't add up", text))
