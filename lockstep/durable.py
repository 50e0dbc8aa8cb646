"""Writing files so that a crash at any byte leaves the old content or the new one, never half of it.

The recipe is always the same: write beside, fsync the file, rename, fsync the folder that holds the name. And a lock,
so that one process at a time does so in a folder.
"""

from __future__ import annotations

import fcntl
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


class LockedByAnother(Exception):
    """Another process holds the lock, or this one already does (``by_this_process``). The text is who."""

    def __init__(self, holder: str, *, by_this_process: bool = False) -> None:
        super().__init__(holder)
        self.by_this_process = by_this_process


_held: set[Path] = set()


class ProcessLock:
    """An exclusive lock on a file, with the holder's pid in it. Raises ``LockedByAnother`` if it is taken.

    A POSIX record lock, not ``flock``: it dies with the process itself, while a ``flock`` lives on in any worker that
    was forked from it. It does not tell two holders in one process apart, so those are counted in ``_held``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._descriptor = -1
        if self._path in _held:
            raise LockedByAnother(f"this process (pid {os.getpid()})", by_this_process=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 100, 0).decode("ascii", errors="replace").strip()
            os.close(descriptor)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            raise LockedByAnother(f"another process ({holder or 'pid unknown'})") from error
        self._descriptor = descriptor
        _held.add(self._path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back; nothing happens if that was done already."""
        if self._descriptor < 0:
            return
        _held.discard(self._path)
        os.close(self._descriptor)  # gives the lock back
        self._descriptor = -1
