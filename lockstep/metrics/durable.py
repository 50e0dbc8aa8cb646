"""Writing files so that a crash at any byte leaves the old content or the new one, never half of it.

The recipe is always the same: write beside, fsync the file, rename, fsync the folder that holds the name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Force a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Force every file and folder below ``root``, and ``root`` itself, to the disk."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Replace ``path`` by what ``write`` puts into the temporary path it is given. The temporary file is removed if
    anything fails."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write(temporary)
        fsync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8)."""
    replace_file(path, lambda temporary: _write_bytes(temporary, text.encode("utf-8")))


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder and force the new name, and the loss of the old one, to the disk."""
    os.rename(source, target)
    fsync_path(target.parent)
    if source.parent != target.parent:
        fsync_path(source.parent)
