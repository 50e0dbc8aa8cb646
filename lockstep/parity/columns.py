"""Reads the columns of a recorded file (see ``recorded``) into flat arrays, one value per token.

Files are untrusted: types and sizes are checked from headers and metadata before the data is read, and nothing is ever
unpickled.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {
    "train_logprobs": "float",
    "rollout_logprobs": "float",
    "loss_mask": "bool",
    "rejected": "bool",
    "step": "int",
    "sequence_id": "label",
    "rollout_id": "label",
    "replica": "label",
    "versions": "int",
    "kv_versions": "int",
    "trainer_version": "int",
    "positions": "int",
    "tokens": "int",
    "token_texts": "text",
    "train_top1": "int",
    "rollout_top1": "int",
    "train_routes": "int",
    "rollout_routes": "int",
}
"""Columns by name and what they must hold."""

NEEDED = ("train_logprobs", "rollout_logprobs")
BY_ROW = ("step", "sequence_id", "rollout_id", "replica", "trainer_version")
"""One value per row where the file has rows."""

ROUTES = ("train_routes", "rollout_routes")

MAX_TOKENS = 200_000_000
MAX_BYTES = 8 * 2**30
"""Of all columns together, uncompressed."""

_KINDS = {"float": "f", "int": "iu", "bool": "biu", "label": "iuUSO", "text": "USO"}


class RecordedError(ValueError):
    """The file can't be read as recorded log-probs; the text names the file, the column and what is needed."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Flat columns [N] by name; ``step`` [N]; ``has_rows``: ``values["row"]`` numbers the file's rows."""

    path: Path
    has_rows: bool
    step: np.ndarray
    values: dict[str, np.ndarray]
    notes: tuple[str, ...] = ()

    def of(self, name: str) -> np.ndarray | None:
        """A column, or None if the file has none of that name."""
        return self.values.get(name)

    def steps(self) -> list[int]:
        """The steps in the file, rising."""
        return np.unique(self.step).tolist()


def read_columns(path: Path) -> Columns:
    """Read ``path``. Raises RecordedError; FileNotFoundError if it is not there."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give a .parquet or .npz file of recorded log-probs")
    if path.suffix == ".npz":
        return _from_npz(path)
    if path.suffix == ".parquet":
        return _from_parquet(path)
    raise RecordedError(f"{path}: a .parquet or .npz file is needed, got {path.suffix or 'a name without ending'!r}")


def _finish(path: Path, columns: dict[str, np.ndarray], lengths: np.ndarray | None, notes: list[str]) -> Columns:
    """Spread values by row over tokens, check types and lengths. ``lengths`` [B]: tokens per row; None: flat."""
    flat: dict[str, np.ndarray] = {}
    num_tokens = len(columns["train_logprobs"])
    for name, values in columns.items():
        if lengths is not None and name in BY_ROW:
            if len(values) != len(lengths):
                raise RecordedError(f"{path}: column {name} has {len(values)} values for {len(lengths)} rows")
            values = np.repeat(values, lengths)
        if len(values) != num_tokens:
            raise RecordedError(
                f"{path}: column {name} has {len(values)} tokens, column train_logprobs {num_tokens}; index t of both "
                "must be the same token"
            )
        flat[name] = _typed(path, name, values)
    if lengths is not None:
        flat["row"] = np.repeat(np.arange(len(lengths)), lengths)
    return Columns(path, lengths is not None, flat.get("step", np.ones(num_tokens, dtype=np.int64)), flat, tuple(notes))


def _typed(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    wanted = TYPES[name]
    if wanted == "bool" and values.dtype.kind in "iu" and not np.isin(values, (0, 1)).all():
        raise RecordedError(f"{path}: column {name} holds other numbers than 0 and 1")
    if wanted == "bool":
        return values.astype(bool)
    if wanted == "int" and name not in ROUTES:
        return values.astype(np.int64)
    if values.dtype.kind == "S":  # a token may well end within a character
        return np.char.decode(values, "utf-8", "replace")
    return values.astype(str) if wanted == "text" or values.dtype.kind == "O" else values


def _check(path: Path, names: set[str], types: dict[str, tuple[str, str]], num_tokens: int, num_bytes: int) -> None:
    """Everything that can be said before data is read. ``types``: numpy's kind letter and the name of each column's."""
    for name in NEEDED:
        if name not in names:
            there = ", ".join(sorted(names)) or "none"
            raise RecordedError(f"{path}: column {name} is missing; needed: {' and '.join(NEEDED)}; there are: {there}")
    for name, (kind, type_name) in types.items():
        if kind not in _KINDS[TYPES[name]]:
            raise RecordedError(f"{path}: column {name} must hold {TYPES[name]} values, its type is {type_name}")
    for first, second in (("train_top1", "rollout_top1"), ROUTES):
        if (first in names) != (second in names):
            raise RecordedError(f"{path}: columns {first} and {second} belong together; only one is there")
    if num_tokens > MAX_TOKENS or num_bytes > MAX_BYTES:
        raise RecordedError(
            f"{path}: {num_tokens:,} tokens in {num_bytes:,} bytes; at most {MAX_TOKENS:,} tokens and {MAX_BYTES:,} "
            "bytes are read: split the file by step"
        )


# --- npz --------------------------------------------------------------------------------------------------------------


def _from_npz(path: Path) -> Columns:
    headers = _npz_headers(path)
    kinds = {name: (dtype.kind, str(dtype)) for name, (_, dtype) in headers.items()}
    if objects := [name for name, (kind, _) in kinds.items() if kind == "O"]:
        raise RecordedError(f"{path}: column {objects[0]} holds Python objects, which are never unpickled; save arrays")
    sizes = {name: math.prod(headers[name][0]) * headers[name][1].itemsize for name in kinds}
    shape = headers.get("train_logprobs", ((), None))[0]
    _check(path, set(headers), kinds, math.prod(shape), sum(sizes.values()))
    if len(shape) not in (1, 2):
        raise RecordedError(f"{path}: column train_logprobs must be [N] or [B, T], its shape is {list(shape)}")
    has_rows = len(shape) == 2
    for name in kinds:
        expected = shape[:1] if has_rows and name in BY_ROW else shape
        own = headers[name][0]
        if (own[:-2] if name in ROUTES else own) != expected:
            wanted = [*expected, "L", "K"] if name in ROUTES else list(expected)
            raise RecordedError(f"{path}: column {name} has the shape {list(own)}; needed: {wanted}")
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in kinds}
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError) as error:
        raise RecordedError(f"{path} can't be read as .npz: {error}") from error
    if not has_rows:
        return _finish(path, columns, None, [])
    flat = {name: v if name in BY_ROW else v.reshape(-1, *v.shape[2:]) for name, v in columns.items()}
    return _finish(path, flat, np.full(shape[0], shape[1]), [])


def _npz_headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of each array, from the headers alone."""
    headers: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name not in TYPES:
                    continue
                with archive.open(member) as stream:
                    version = np.lib.format.read_magic(stream)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else (np.lib.format.read_array_header_2_0)
                    )
                    shape, _, dtype = read(stream)
                headers[name] = (shape, dtype)
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise RecordedError(f"{path} can't be read as .npz: {error}") from error
    return headers


# --- parquet ----------------------------------------------------------------------------------------------------------


def _from_parquet(path: Path) -> Columns:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError) as error:
        raise RecordedError(f"{path} can't be read as .parquet: {error}") from error
    wanted = [name for name in schema.names if name in TYPES and name not in ROUTES]
    if twice := sorted({name for name in wanted if wanted.count(name) > 1}):
        raise RecordedError(f"{path}: column {twice[0]} is there twice: which one is meant is open")
    lists = {name for name in wanted if pa.types.is_list(schema.field(name).type)
             or pa.types.is_large_list(schema.field(name).type)}  # fmt: skip
    kinds = {name: (_arrow_kind(schema.field(name).type), str(schema.field(name).type)) for name in wanted}
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    leaves = [group.column(j) for group in groups for j in range(group.num_columns)]
    known = [leaf for leaf in leaves if leaf.path_in_schema.split(".")[0] in wanted]
    counts: dict[str, int] = {}
    for leaf in known:
        counts[leaf.path_in_schema] = counts.get(leaf.path_in_schema, 0) + leaf.num_values
    declared = sum(leaf.total_uncompressed_size for leaf in known)
    _check(path, set(wanted), kinds, max(counts.values(), default=0), max(declared, 4 * sum(counts.values())))
    has_rows = "train_logprobs" in lists
    for name in wanted:
        if (name in lists) != (has_rows and name not in BY_ROW):
            need = "a list per row" if has_rows and name not in BY_ROW else "a single value per row"
            raise RecordedError(f"{path}: column {name} needs {need}, as train_logprobs has it; see the documentation")
    try:
        table = file.read(columns=wanted)
    except (pa.ArrowException, OSError) as error:
        raise RecordedError(f"{path} can't be read as .parquet: {error}") from error
    return _from_table(path, table, has_rows)


def _from_table(path: Path, table: Any, has_rows: bool) -> Columns:
    notes: list[str] = []
    missing = table.column("train_logprobs").null_count
    if has_rows and missing:
        table = table.filter(table.column("train_logprobs").is_valid())
        notes.append(f"{missing} rows without the trainer's log-probs are left out.")
    columns: dict[str, np.ndarray] = {}
    lengths: np.ndarray | None = None
    for name in table.column_names:
        values = table.column(name).combine_chunks()
        if has_rows and name not in BY_ROW:
            if name in ("token_texts", "rejected") and values.null_count:
                notes.append(f"Column {name} is left out: it is null in {values.null_count} rows.")
                continue
            if values.null_count:
                raise RecordedError(f"{path}: column {name} is null in {values.null_count} rows")
            own = np.diff(values.offsets.to_numpy()).astype(np.int64)
            if lengths is None:
                lengths = own
            elif not np.array_equal(own, lengths):
                row = int(np.flatnonzero(own != lengths)[0])
                raise RecordedError(f"{path}: column {name} has {own[row]} tokens in row {row}, others {lengths[row]}")
            values = values.flatten()
        if values.null_count:
            hint = "; NaN says 'not finite'" if TYPES[name] == "float" else "; each token or row needs a value"
            raise RecordedError(f"{path}: column {name} holds {values.null_count} nulls{hint}")
        columns[name] = values.to_numpy(zero_copy_only=False)
    return _finish(path, columns, lengths, notes)


def _arrow_kind(kind: Any) -> str:
    """numpy's kind letter of an Arrow type, or of the values of a list type; "?" for anything else."""
    import pyarrow.types as t

    inner = kind.value_type if t.is_list(kind) or t.is_large_list(kind) else kind
    tests = {"f": t.is_floating, "i": t.is_signed_integer, "u": t.is_unsigned_integer, "b": t.is_boolean}
    for letter, test in tests.items():
        if test(inner):
            return letter
    return "U" if t.is_string(inner) or t.is_large_string(inner) else "?"
