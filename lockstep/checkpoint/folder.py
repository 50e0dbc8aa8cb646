"""What lies in a checkpoint folder, before any of it is read: what may be read, and what is refused by its name.

Refused: pickles (loading one runs what it says), Python files and configuration keys that make a loader run them,
links that leave the folder, pipes and devices. Subfolders are never looked into: official repositories keep their
reference code and converted copies there (``inference/``, ``original/``), and no loader takes weights from them.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.errors import Problem, shown
from lockstep.checkpoint.strict_json import JsonError, read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".distcp")
CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")
MAX_SIDE_FILE_BYTES = 16 << 20


@dataclass(slots=True)
class FolderFiles:
    """Files that may be read, by name: ``weights`` (.safetensors) and ``others``; names that were ``refused``."""

    weights: dict[str, Path] = field(default_factory=dict)
    others: dict[str, Path] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)


def list_folder(folder: Path, problems: list[Problem]) -> FolderFiles | None:
    """The folder's files, in order of their names, as paths that are no links. None if there is no such folder."""
    try:
        names = sorted(os.listdir(folder))
        root = folder.resolve(strict=True)
    except OSError as error:
        problems.append(Problem("no checkpoint folder", f"{folder}: {error.strerror or error}"))
        return None
    files = FolderFiles()
    for name in names:
        before = len(problems)
        path = _admitted(root, name, problems)
        if len(problems) > before:
            files.refused.add(name)
        elif path is not None:
            (files.weights if name.endswith(".safetensors") else files.others)[name] = path
    _check_code_keys(files, problems)
    return files


def _admitted(root: Path, name: str, problems: list[Problem]) -> Path | None:
    """The resolved path of a file that may be read; None for a folder, and for what is refused with a problem."""
    suffix = os.path.splitext(name)[1].lower()
    path = root / name
    try:
        target = path.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError):
        problems.append(Problem("broken link", f"{shown(name)} leads nowhere"))
        return None
    if path.is_symlink() and not target.is_relative_to(root) and not _is_hub_blob(root, target):
        problems.append(Problem("link out of the folder", f"{shown(name)}: replace the link by the file that it means"))
        return None
    if stat.S_ISDIR(mode):
        return None
    if not stat.S_ISREG(mode):
        problems.append(Problem("no regular file", f"{shown(name)} is a pipe, a socket or a device"))
    elif suffix in PICKLES:
        text = f"{shown(name)} is never loaded: remove it, or convert it to .safetensors where you trust it"
        problems.append(Problem("pickle, or a format that may hold one", text))
    elif suffix in (".py", ".pyc", ".so"):
        text = f"{shown(name)} would run with the model: remove it; the architectures known here need no code"
        problems.append(Problem("code in the checkpoint", text))
    else:
        return target
    return None


def _is_hub_blob(root: Path, target: Path) -> bool:
    """Hugging Face's cache: ``<model>/snapshots/<commit>/<file>`` is a link to ``<model>/blobs/<digest>``."""
    return root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"


def _check_code_keys(files: FolderFiles, problems: list[Problem]) -> None:
    for name in files.others:
        if not name.endswith("config.json"):  # tokenizer_config.json, preprocessor_config.json, …
            continue
        try:
            config = read_object(files.others[name], MAX_SIDE_FILE_BYTES)
        except (JsonError, OSError) as error:
            if name != "config.json":  # whoever needs it reports it
                problems.append(Problem("configuration is refused", f"{shown(name)}: {error}"))
            continue
        for place in code_keys(config):
            text = f"{shown(name)}: {shown(place)} makes a loader run code from the checkpoint: remove the key"
            problems.append(Problem("code in the checkpoint", text))


def code_keys(value: Any, place: str = "") -> list[str]:
    """Where a configuration asks to run code, at any depth: dotted places of forbidden keys."""
    found: list[str] = []
    if isinstance(value, dict):
        for key, inner in value.items():
            here = f"{place}.{key}" if place else key
            found += [here] if key in CODE_KEYS else code_keys(inner, here)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            found += code_keys(inner, f"{place}[{number}]")
    return found
