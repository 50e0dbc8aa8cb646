"""What a run reads from outside its configuration, by content: a resume with other data would be another run."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from lockstep.config.schema import FileTask, GgufModel, ModelSource, PathModel, RunConfig
from lockstep.model.load import gguf_path

SMALL_BYTES = 512 << 20
"""Files up to this size are told apart by SHA-256, larger ones (weights) by size and time of change."""


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Configuration key → identity of the file that it names: data, weights, modules of user rewards."""
    return dict(_files(config))


def changed_inputs(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Keys whose file is another one now."""
    return [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]


def _files(config: RunConfig) -> Iterator[tuple[str, str]]:
    for key, source in (("model", config.model), ("reference", config.reference), ("teacher", config.teacher)):
        if source is not None:
            yield from _model_files(key, source)
    if isinstance(config.task, FileTask):
        yield "task.path", identity(Path(config.task.path))
        if config.task.heldout_path is not None:
            yield "task.heldout_path", identity(Path(config.task.heldout_path))
    for index, reward in enumerate(config.task.rewards):
        module, separator, _ = reward.name.partition(":")
        origin = _origin(module) if separator else None
        if origin is not None:
            yield f"task.rewards[{index}]", identity(Path(origin))


def _origin(module: str) -> str | None:
    """The file of a module; None if it can't be found, or if a package above it can't be imported: what is wrong with a
    reward is told where it is loaded."""
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit):  # a package's sys.exit() would end the run as if it had succeeded
        return None
    return None if spec is None else spec.origin


def _model_files(key: str, source: ModelSource) -> Iterator[tuple[str, str]]:
    if isinstance(source, GgufModel):
        yield key, identity(gguf_path(source))
    elif isinstance(source, PathModel):
        for file in sorted(Path(source.path).glob("*")):
            if file.suffix in (".json", ".safetensors", ".jinja", ".model", ".txt"):
                yield f"{key}:{file.name}", identity(file)


def identity(path: Path) -> str:
    """SHA-256 of a file's content; of a large one size and time of change. "absent" if there is no such file."""
    if not path.is_file():
        return "absent"
    stat = path.stat()
    if stat.st_size > SMALL_BYTES:
        return f"{stat.st_size} bytes, changed at {stat.st_mtime_ns} ns"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
