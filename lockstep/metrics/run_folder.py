"""A run folder: everything that a run leaves behind, and the one place that knows where it lies.

::

    config.toml              resolved configuration, with the origin of each value
    environment.json         versions, hardware, variables
    metrics.jsonl            one object per step, on the disk before the next step starts
    agreement.jsonl          per step the difference by place and the worst tokens (see ``parity.rows``)
    rollouts/step-000001.parquet   tokens, log-probs of both sides, rewards, versions (see ``rollout_file``)
    refits.jsonl             receipts, one per refit
    engine/step-000012.safetensors  what the engine computed with otherwise than the trainer, where the gate stopped
    trace.json               Chrome/Perfetto spans
    checkpoints/step-000050/ see ``checkpoints``
    report.html              see ``report``
    superseded/000001/       what a rewind or a changed configuration moved out of the way; nothing is deleted
    run.lock                 held by the process that writes here

Readers need no lock: every file is either append-only or replaced whole.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from lockstep.durable import LockedByAnother, ProcessLock, rename_durably, replace_text
from lockstep.metrics.checkpoints import Checkpoints
from lockstep.metrics.metric import check_row, encode_nonfinite
from lockstep.metrics.rollout_file import RecordedSequence, TokenTexts, read_rollout_file, write_rollout_file
from lockstep.metrics.sinks import JsonlSink, Row
from lockstep.records import FloatArray, Rollout

logger = logging.getLogger(__name__)

LOCK = "run.lock"
CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
AGREEMENT = "agreement.jsonl"
REFITS = "refits.jsonl"
ROLLOUTS = "rollouts"
TRACE = "trace.json"

_ROLLOUT_FILE = re.compile(r"step-(\d{6,})\.parquet")


class RunFolderError(Exception):
    """The folder can't be used for a run; the text says why and what to do."""


def rollout_steps(path: Path) -> list[int]:
    """Steps of a run folder whose rollouts were recorded, in order. Needs no lock."""
    folder = Path(path) / ROLLOUTS
    matches = (_ROLLOUT_FILE.fullmatch(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in matches if match)


def read_rollouts(path: Path, step: int) -> list[RecordedSequence]:
    """Recorded sequences of one step of the run folder ``path``. Needs no lock. FileNotFoundError names the steps that
    there are."""
    file = _rollout_path(Path(path), step)
    if not file.exists():
        there = rollout_steps(path)
        recorded = f"recorded: {there[0]} to {there[-1]} ({len(there)} steps)" if there else "none are recorded"
        raise FileNotFoundError(f"{path} has no rollouts of step {step}; {recorded}")
    return read_rollout_file(file)


def _rollout_path(root: Path, step: int) -> Path:
    return root / ROLLOUTS / f"step-{step:06d}.parquet"


class RunFolder:
    """Creates or opens a run folder and holds its lock until ``close``.

    Opening repairs what a crash left: an unfinished last line of a ``.jsonl`` is cut, unfinished checkpoints and
    temporary files are removed, each with a warning. Raises RunFolderError when another process writes there (its pid
    is in the text), or when the path holds something that is not a run.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self._prepare()
        self._lock = _locked(self.path)
        try:
            for temporary in [*self.path.glob(".*.partial"), *(self.path / ROLLOUTS).glob(".*.partial")]:
                logger.warning("removing %s, left by a write that did not finish", temporary)
                temporary.unlink()
            self.checkpoints = Checkpoints(self.path / "checkpoints")
            self.checkpoints.recover()
            self._metrics = JsonlSink(self.path / METRICS, order_key="step")
            self._refits = JsonlSink(self.path / REFITS)
            self._agreement = JsonlSink(self.path / AGREEMENT)
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Close the files and give the lock back."""
        self._metrics.close()
        self._refits.close()
        self._agreement.close()
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- configuration and environment ---

    def config_text(self) -> str | None:
        """What ``write_config`` wrote, or None for a new run."""
        file = self.path / CONFIG
        return file.read_text(encoding="utf-8") if file.exists() else None

    def write_config(self, text: str) -> None:
        """Write the resolved configuration; a different earlier one is kept under ``superseded``."""
        earlier = self.config_text()
        if earlier is not None and earlier != text:
            replace_text(self._new_superseded() / CONFIG, earlier)
        replace_text(self.path / CONFIG, text)

    def write_environment(self, environment: Mapping[str, object]) -> None:
        """Write versions, hardware and variables as JSON. The caller leaves secrets out."""
        encoded = json.dumps(encode_nonfinite(environment), indent=2, ensure_ascii=False, allow_nan=False)
        replace_text(self.path / ENVIRONMENT, encoded + "\n")

    # --- rows ---

    def append_metrics(self, row: Mapping[str, object]) -> None:
        """Append the step's row (``step`` must rise); on the disk when this returns. See ``metric`` for its law."""
        self._metrics.append(check_row(row))

    def metrics(self) -> list[Row]:
        """All rows so far."""
        return self._metrics.rows()

    def append_refit(self, receipt: Mapping[str, object]) -> None:
        """Append a refit's receipt, which must hold ``step`` (0 before the first), so that a resume can tell which
        receipts belong to steps that will be run again."""
        step = receipt.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f"a refit receipt needs the whole number 'step', got {step!r}")
        self._refits.append(receipt)

    def refits(self) -> list[Row]:
        """All receipts so far."""
        return self._refits.rows()

    def append_agreement(self, row: Mapping[str, object]) -> None:
        """Append a step's line of ``parity.rows``, which must hold ``step``."""
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f"a line of {AGREEMENT} needs the whole number 'step', got {step!r}")
        self._agreement.append(row)

    # --- rollouts ---

    def write_rollouts(
        self,
        step: int,
        rollouts: Seq[Rollout],
        train_logprobs: Mapping[str, FloatArray],
        token_texts: TokenTexts | None = None,
    ) -> Path:
        """Write the step's rollouts, whole or not at all; see ``rollout_file`` for columns and errors."""
        file = _rollout_path(self.path, step)
        file.parent.mkdir(exist_ok=True)
        write_rollout_file(file, step, rollouts, train_logprobs, token_texts)
        return file

    def read_rollouts(self, step: int) -> list[RecordedSequence]:
        """Recorded sequences of one step."""
        return read_rollouts(self.path, step)

    # --- checkpoints ---

    def saving_checkpoint(
        self, step: int, estimate_bytes: int = 0, required: Iterable[str] = ()
    ) -> AbstractContextManager[Path]:
        """``with folder.saving_checkpoint(step) as path: …``; see ``Checkpoints.saving``."""
        return self.checkpoints.saving(step, estimate_bytes, required)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """(step, folder) of the newest good checkpoint; see ``Checkpoints.latest``."""
        return self.checkpoints.latest()

    def prune_checkpoints(self, keep: int) -> list[int]:
        """Delete old checkpoints; see ``Checkpoints.prune``."""
        return self.checkpoints.prune(keep)

    # --- resume ---

    def rewind(self, step: int) -> Path | None:
        """Make the folder look as it did right after ``step``: rows, receipts, rollouts and checkpoints of later steps
        move to ``superseded/N``, whose path is returned (None if there were none). Nothing is lost at any crash; a
        rewind that was cut short is completed by the next one."""
        late_rollouts = [late for late in rollout_steps(self.path) if late > step]
        late_checkpoints = [late for late in self.checkpoints.steps() if late > step]
        rows = [*self.metrics(), *self.refits(), *self._agreement.rows()]
        late_rows = any(_step_of(row) > step for row in rows)
        if not (late_rollouts or late_checkpoints or late_rows):
            return None
        aside = self._new_superseded()
        for late in late_rollouts:
            rename_durably(_rollout_path(self.path, late), aside / _rollout_path(self.path, late).name)
        for late in late_checkpoints:
            source = self.checkpoints.path(late)
            rename_durably(source, aside / f"checkpoint-{source.name}")
        self._refits.rewind(lambda row: _step_of(row) <= step, aside / REFITS)
        self._agreement.rewind(lambda row: _step_of(row) <= step, aside / AGREEMENT)
        self._metrics.rewind(lambda row: _step_of(row) <= step, aside / METRICS)
        if step < 0:
            logger.warning("starting again: no step had been saved; what there was has been moved to %s", aside)
        else:
            logger.warning("resuming after step %d: what later steps had left was moved to %s", step, aside)
        return aside

    # --- helpers ---

    def _prepare(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; a run needs a folder")
        if self.path.exists() and not any((self.path / name).exists() for name in (LOCK, CONFIG, METRICS)):
            foreign = sorted(entry.name for entry in self.path.iterdir())
            if foreign:
                raise RunFolderError(
                    f"{self.path} is not empty and is no run folder (it holds {', '.join(foreign[:3])}…); "
                    "choose a new or an empty folder"
                )
        self.path.mkdir(parents=True, exist_ok=True)

    def _new_superseded(self) -> Path:
        parent = self.path / "superseded"
        parent.mkdir(exist_ok=True)
        taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isdigit()]
        folder = parent / f"{max(taken, default=0) + 1:06d}"
        folder.mkdir()
        return folder


def _step_of(row: Row) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else 0


def _locked(folder: Path) -> ProcessLock:
    try:
        return ProcessLock(folder / LOCK)
    except LockedByAnother as error:
        if error.by_this_process:
            raise RunFolderError(f"{folder} is already open in {error}") from error
        raise RunFolderError(
            f"{folder} is in use by {error}; wait for it, stop it, or choose another run folder"
        ) from error
