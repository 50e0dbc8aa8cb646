"""Checkpoints that a crash can't spoil: written beside, verified, marked, renamed.

::

    checkpoints/
      .step-000020.partial/   being written; removed when a run takes the folder up again
      step-000010/            complete: holds complete.json, written last, and every file that it lists
      .step-000005.deleting/  being removed; tried again later if the removal failed

``complete.json`` lists every file with its size, and with its SHA-256 when it is at most ``SHA256_MAX_BYTES`` (hashing
gigabytes of optimizer state at each save would cost more than it finds: such files were forced to the disk before the
marker was written, and a cut file shows in its size). A folder counts only if the marker is there and every listed
file agrees with it, so neither the highest number nor a folder's existence is ever trusted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.durable import fsync_tree, rename_durably, replace_text

logger = logging.getLogger(__name__)

MARKER = "complete.json"
SHA256_MAX_BYTES = 16 * 2**20

_FINAL = re.compile(r"step-(\d{6,})")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointError(Exception):
    """A checkpoint can't be written or read. The text says what is wrong, and which good checkpoint there is."""


class Checkpoints:
    """The checkpoints of one run, in the folder ``root``, which need not be there. Anyone may read.

    What writes (``recover``, ``begin``, ``finish``, ``abandon``, ``saving``, ``prune``) is for the one process that
    holds the run folder's lock: a reader can't tell a save that is going on from one that a crash cut short.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def recover(self) -> None:
        """Make the folder and remove what a crash left unfinished. Only for the holder of the run folder's lock."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()

    def path(self, step: int) -> Path:
        """Folder of a complete checkpoint."""
        return self.root / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a folder under its final name, oldest first; verified or not. None if ``root`` is missing."""
        if not self.root.is_dir():
            return []
        matches = (_FINAL.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def problems(self, step: int) -> list[str]:
        """Why the checkpoint of a step can't be used; empty if it is complete and agrees with its marker."""
        return verify(self.path(step))

    def has(self, step: int) -> bool:
        """Whether the step has a complete, verified checkpoint."""
        return self.path(step).is_dir() and not self.problems(step)

    def latest(self) -> tuple[int, Path] | None:
        """(step, folder) of the newest complete checkpoint; None if nothing was ever saved.

        Falls back past damaged ones and logs why. Raises CheckpointError when there are checkpoints and none is good:
        starting afresh in silence would lose the run.
        """
        reasons: list[str] = []
        for step in reversed(self.steps()):
            problems = self.problems(step)
            if not problems:
                for reason in reasons:
                    logger.warning("%s; falling back to step %d", reason, step)
                return step, self.path(step)
            reasons.append(f"checkpoint of step {step} is damaged ({'; '.join(problems)})")
        if reasons:
            raise CheckpointError(
                f"{self.root} has no usable checkpoint: {'; '.join(reasons)}. Restore one of them, or move the folder "
                "away to start from the beginning."
            )
        return None

    def check_space(self, estimate_bytes: int) -> None:
        """Raise CheckpointError unless the disk has ``estimate_bytes`` free for this user. Needs ``root`` to exist."""
        free_bytes = shutil.disk_usage(self.root).free
        if free_bytes < estimate_bytes:
            raise CheckpointError(
                f"not enough disk space for a checkpoint in {self.root}: {estimate_bytes:,} bytes needed, "
                f"{free_bytes:,} free. {self._last_good()} Free some space, or lower checkpoint.keep."
            )

    def begin(self, step: int, estimate_bytes: int = 0) -> Path:
        """An empty folder to write the step's checkpoint into. Refused with CheckpointError when the step already has
        a good one, or when the disk has less than ``estimate_bytes`` free; nothing has been written then."""
        if self.has(step):
            raise CheckpointError(f"step {step} already has a complete checkpoint in {self.path(step)}")
        self.root.mkdir(parents=True, exist_ok=True)
        self.check_space(estimate_bytes)
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def finish(self, step: int, required: Iterable[str] = ()) -> Path:
        """Verify, force to the disk, mark and rename what was written since ``begin``; returns the final folder.

        ``required`` names files (relative paths) that must be there and not be empty. CheckpointError if one is not, or
        if there is no file at all; the previous checkpoint is untouched then.
        """
        partial = self._partial(step)
        if not partial.is_dir():
            raise CheckpointError(f"checkpoint of step {step} was not begun: {partial} does not exist")
        missing = [name for name in required if not _is_filled(partial / name)]
        files = _list_files(partial)
        if missing or not files:
            what = f"missing or empty: {', '.join(missing)}" if missing else "it has no files"
            raise CheckpointError(f"checkpoint of step {step} is not complete: {what}. {self._last_good()}")
        fsync_tree(partial)
        replace_text(partial / MARKER, json.dumps({"step": step, "files": files}, indent=1, sort_keys=True) + "\n")
        final = self.path(step)
        if final.exists():  # begin() let only a damaged one pass
            logger.warning("replacing the damaged checkpoint of step %d", step)
            self._delete(step)
        rename_durably(partial, final)
        return final

    def abandon(self, step: int) -> None:
        """Remove what was written since ``begin``, to give its space back. Does nothing if there is nothing."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    @contextmanager
    def saving(self, step: int, estimate_bytes: int = 0, required: Iterable[str] = ()) -> Iterator[Path]:
        """``begin``, the block, ``finish``. Any failure removes the unfinished folder; a full disk becomes a
        CheckpointError that names the last good checkpoint; every other error is raised as it is."""
        try:
            yield self.begin(step, estimate_bytes)
            self.finish(step, required)
        except OSError as error:
            self.abandon(step)
            if error.errno in _NO_SPACE:
                raise CheckpointError(
                    f"the disk filled up while the checkpoint of step {step} was written to {self.root} "
                    f"({error.strerror}). {self._last_good()}"
                ) from error
            raise
        except BaseException:
            self.abandon(step)
            raise

    def prune(self, keep: int) -> list[int]:
        """Delete all but the newest ``keep`` good checkpoints, and damaged ones older than the newest good one; the
        steps that were deleted. Deletes nothing unless a newer good one is there. A deletion that fails is a warning,
        and is tried again at the next call."""
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept")
        self._remove_leftovers()
        good = [step for step in self.steps() if self.has(step)]
        if not good:
            return []
        kept = set(good[-keep:])
        return [step for step in self.steps() if step not in kept and step < good[-1] and self._delete(step)]

    def _delete(self, step: int) -> bool:
        """Remove a checkpoint under another name, so that a half-removed one never looks like a checkpoint."""
        doomed = self.root / f".step-{step:06d}.deleting"
        try:
            rename_durably(self.path(step), doomed)
        except OSError as error:
            logger.warning("could not delete the old checkpoint of step %d (%s); trying again later", step, error)
            return False
        self._remove(doomed)
        return True

    def _remove_leftovers(self) -> None:
        for entry in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if entry.name.endswith(".partial"):
                logger.warning("removing %s, left by a save that did not finish", entry)
            if entry.name.endswith((".partial", ".deleting")):
                self._remove(entry)

    def _remove(self, folder: Path) -> None:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("could not remove %s (%s); trying again later", folder, error)

    def _partial(self, step: int) -> Path:
        return self.root / f".step-{step:06d}.partial"

    def _last_good(self) -> str:
        good = [step for step in self.steps() if self.has(step)]
        return f"The last good checkpoint is {self.path(good[-1])}." if good else "There is no earlier checkpoint."


def verify(folder: Path) -> list[str]:
    """What is wrong with a checkpoint folder, judged by its marker; empty if nothing is. Files that the marker does
    not list are logged: they were not part of the save."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        listed = dict(marker["files"])
    except FileNotFoundError:
        return [f"it has no {MARKER}"]
    except (ValueError, KeyError, TypeError, NotADirectoryError) as error:
        return [f"its {MARKER} can't be read ({error})"]
    problems = []
    for name, expected in listed.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            problems.append(f"{name} has {path.stat().st_size:,} bytes instead of {expected['bytes']:,}")
        elif "sha256" in expected and _sha256(path) != expected["sha256"]:
            problems.append(f"{name} differs from its checksum")
    if extra := sorted(set(_list_names(folder)) - set(listed) - {MARKER}):
        logger.warning("%s holds files that were not saved with it: %s", folder, ", ".join(extra))
    return problems


def _list_names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _list_files(folder: Path) -> dict[str, dict[str, object]]:
    files: dict[str, dict[str, object]] = {}
    for name in _list_names(folder):
        path = folder / name
        files[name] = {"bytes": path.stat().st_size}
        if path.stat().st_size <= SHA256_MAX_BYTES:
            files[name]["sha256"] = _sha256(path)
    return files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
