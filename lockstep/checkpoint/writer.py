"""Writing the files of a stage so that a kill at any byte leaves whole files and a list of them.

For each file: ``.NAME.partial`` is written, forced to the disk, read back for its SHA-256, renamed, and then entered in
the work list. Files that the list has are verified by that digest and not written again; everything else in the way is
written anew. Several files may be written at a time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep.checkpoint.errors import CheckpointError
from lockstep.checkpoint.tensors import OpenFiles
from lockstep.checkpoint.work_list import DoneFile, WorkList
from lockstep.durable import rename_durably
from lockstep.hardware.allocator import KeptPages

CHUNK_BYTES = 4 << 20
MIN_BUDGET_BYTES = 256 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Progress(Protocol):
    """Who is told how far a stage is."""

    def begin(self, what: str, total_bytes: int) -> None:
        """Something of ``total_bytes`` begins."""
        ...

    def advance(self, num_bytes: int) -> None:
        """So many bytes more are done. Called from any thread."""
        ...


class Sink:
    """The file that a job writes: bytes at offsets, in any order."""

    def __init__(self, descriptor: int, progress: Progress) -> None:
        self._descriptor, self._progress = descriptor, progress
        self.end = 0  # of what was written

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``. Raises OSError."""
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            count = os.pwrite(self._descriptor, view[done : done + (8 << 20)], offset + done)
            done += count
            self._progress.advance(count)
        self.end = max(self.end, offset + len(view))

    def copy(self, files: OpenFiles, file: str, begin: int, end: int, offset: int) -> None:
        """Copy the bytes ``begin`` to ``end`` of a source file to ``offset``."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(end - begin, 1))))
        for start in range(begin, end, len(buffer)):
            part = buffer[: min(len(buffer), end - start)]
            files.read_into(file, start, part)
            self.write(part, offset + start - begin)


@dataclass(frozen=True, slots=True)
class FileJob:
    """One file to write. ``num_bytes``: its size (an estimate unless ``exact``). ``plan``: digest of everything that
    determines its content beside the stage's inputs. ``write`` fills it and returns JSON for ``DoneFile.details``.
    ``last``: written when all others are, and anew when any of them was."""

    name: str
    num_bytes: int
    plan: str
    write: Callable[[Sink], dict[str, Any]]
    exact: bool = True
    last: bool = False


def bytes_job(name: str, content: bytes, *, last: bool = False) -> FileJob:
    """A small file of known content."""

    def write(sink: Sink) -> dict[str, Any]:
        sink.write(content, 0)
        return {}

    return FileJob(name, len(content), hashlib.sha256(content).hexdigest(), write, last=last)


class ByteBudget:
    """Memory that workers share: whoever needs more than there is waits, and who needs more than all of it is alone.

    Pages that the heap keeps of earlier blocks count too. Blocks of ever different sizes fragment it, and without this
    a preparation grew to twice its budget; they are given back before they would exceed it.
    """

    def __init__(self, num_bytes: int) -> None:
        self._limit, self._used = num_bytes, 0
        self._changed = threading.Condition()
        self._kept = KeptPages()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Hold ``num_bytes`` during the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + num_bytes <= self._limit)
            self._used += num_bytes
            if self._used + self._kept.num_bytes() > self._limit:
                self._kept.give_back()
        try:
            yield
        finally:
            with self._changed:
                self._used -= num_bytes
                self._changed.notify_all()


def run_jobs(
    folder: Path, stage: str, jobs: Sequence[FileJob], work: WorkList, *, workers: int, progress: Progress
) -> dict[str, DoneFile]:
    """Bring ``folder`` to hold exactly the files of ``jobs``. Returns them as the work list has them.

    Raises CheckpointError if the disk is too small or fills up: what is finished stays, and the same call goes on from
    there. Any other error of a job comes through, after the files that are being written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_strangers(folder, {job.name for job in jobs})
    done = work.done(stage)
    claimed = [job for job in jobs if job.name in done and done[job.name].plan == job.plan]
    progress.begin(f"{stage}: verifying", sum(done[job.name].bytes for job in claimed))
    with ThreadPoolExecutor(workers) as pool:
        agreed = list(pool.map(lambda job: _agrees(folder / job.name, done[job.name], progress), claimed))
    kept = {job.name for job, agrees in zip(claimed, agreed, strict=True) if agrees}
    if any(job.name not in kept for job in jobs if not job.last):
        kept -= {job.name for job in jobs if job.last}
    missing = [job for job in jobs if job.name not in kept]
    for name in done.keys() - kept:
        work.forget_file(stage, name)
    _check_space(folder, stage, sum(job.num_bytes for job in missing))
    progress.begin(stage, sum(job.num_bytes for job in missing))
    stop = threading.Event()

    def run(job: FileJob) -> None:
        if stop.is_set():
            return
        try:
            work.finish_file(stage, job.name, _written(folder, job, progress))
        except BaseException:
            stop.set()
            raise

    with _clear_about_space(folder, stage), ThreadPoolExecutor(workers) as pool:
        try:
            for last in (False, True):
                for future in [pool.submit(run, job) for job in missing if job.last == last]:
                    future.result()
        except BaseException:  # an interrupt too: files that are not begun are left
            stop.set()
            raise
        work.complete(stage)
    return work.done(stage)


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if progress is not None:
                progress.advance(count)
    return digest.hexdigest()


def _agrees(path: Path, done: DoneFile, progress: Progress) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != done.bytes:
        return False
    return sha256_of(path, progress) == done.sha256


def _written(folder: Path, job: FileJob, progress: Progress) -> DoneFile:
    temporary = folder / f".{job.name}.partial"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            if job.num_bytes:
                os.posix_fallocate(descriptor, 0, job.num_bytes)  # a full disk shows here, before the work
            sink = Sink(descriptor, progress)
            details = job.write(sink)
            if not job.exact:
                os.ftruncate(descriptor, sink.end)
            os.fsync(descriptor)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if job.exact and size != job.num_bytes:
            raise CheckpointError(folder / job.name, [f"{size} bytes were written instead of {job.num_bytes}"])
        result = DoneFile(size, job.plan, sha256_of(temporary), details)
        rename_durably(temporary, folder / job.name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return result


def _remove_strangers(folder: Path, wanted: set[str]) -> None:
    """What an earlier plan or a kill left. Only files: the folder is the stage's own, subfolders are nobody's."""
    for path in folder.iterdir():
        if path.name not in wanted and (path.is_file() or path.is_symlink()):
            path.unlink()


def _check_space(folder: Path, stage: str, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            folder, [f"{stage} needs {needed:,} bytes and the disk has {free:,}; free some, or choose another target"]
        )


@contextmanager
def _clear_about_space(folder: Path, stage: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise CheckpointError(
            folder,
            [
                f"the disk filled up during {stage} ({error.strerror}); finished files stay, free some space and run "
                "the same command again"
            ],
        ) from error
