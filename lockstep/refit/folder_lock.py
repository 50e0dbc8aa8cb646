"""A folder's transfers and who still lives: each sender holds a lock on a file beside its folder.

Process ids say nothing here. Containers that share a filer may have one host name and each its own process 12, so a
number that is gone in one is at work in another. The lock is the kernel's, or the filer's between machines: it goes
with its holder, however that ends, and whoever gets it may clear away what the holder left. Where a file system keeps
no locks nothing is ever cleared.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "lockstep-refit-"
PARTIAL = ".partial"
_LOCK = ".lock"


@contextmanager
def held(folder: Path, name: str) -> Iterator[None]:
    """While the block runs, nobody clears away the transfer ``name`` of ``folder``. Afterwards it is gone, and its lock
    with it. Raises OSError if the folder can't be written."""
    path = folder / (name + _LOCK)
    descriptor = _locked(path)
    try:
        yield
    finally:
        for left in (folder / name, folder / (name + PARTIAL)):
            shutil.rmtree(left, ignore_errors=True)
        path.unlink(missing_ok=True)
        os.close(descriptor)


def clear_left_over(folder: Path) -> None:
    """Remove the transfers whose senders are no more, on whatever machine or in whatever container they ran."""
    for path in folder.glob(f"{PREFIX}*{_LOCK}"):
        with suppress(OSError):  # held, no locks here, or cleared by another sender at this moment
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                name = path.name.removesuffix(_LOCK)
                for left in (folder / name, folder / (name + PARTIAL)):
                    shutil.rmtree(left, ignore_errors=True)
                path.unlink()
            finally:
                os.close(descriptor)


def _locked(path: Path) -> int:
    """A descriptor that holds the lock of ``path``, which is there: whoever cleared it between its making and its
    locking had it for abandoned, and it is made again."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            return descriptor  # no locks on this file system: nobody gets it, nobody clears
        try:
            there = os.stat(path)
        except FileNotFoundError:
            os.close(descriptor)
            continue
        if os.path.samestat(there, os.fstat(descriptor)):
            return descriptor
        os.close(descriptor)
