"""``lockstep prepare``: from a published checkpoint to what a recipe loads, in stages that can be run one by one.

    fetch ─▶ validate ─▶ prune ─▶ dequantise ─▶ shard        the trainer's: plain/, shards/
                                     └────────▶ quantise     the engine's:  quantised/

A stage that has nothing to do says why, and what went in is what comes out: a source that already has the engine's
format is served as it is. In the target lie ``prepare.json`` (the work list), a lock, and one folder for each stage
that wrote. A stage is done when the digests of its files say so (``writer.py``); it is refused, not mixed, if it was
begun from another source or with other settings.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lockstep.checkpoint.convert import Dequantise, Quantise
from lockstep.checkpoint.errors import CheckpointError
from lockstep.checkpoint.expectation import expectation_of
from lockstep.checkpoint.fetch import fetch, fingerprint
from lockstep.checkpoint.headers import read_checkpoint
from lockstep.checkpoint.inspect import inspect
from lockstep.checkpoint.pairs_on_disk import is_fnuz, scheme_of
from lockstep.checkpoint.prune import Prune
from lockstep.checkpoint.records import CheckpointIndex, Transform
from lockstep.checkpoint.streaming import folder_jobs, promised, weights_bytes
from lockstep.checkpoint.tensors import TensorReader
from lockstep.checkpoint.work_list import WORK_LIST, DoneFile, WorkList
from lockstep.checkpoint.writer import Progress, run_jobs
from lockstep.durable import LockedByAnother, ProcessLock
from lockstep.records import Quantisation
from lockstep.topology.catalogue import model_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.config.prepare_schema import PrepareConfig

StageName = Literal["fetch", "validate", "prune", "dequantise", "quantise", "shard"]
STAGES: tuple[StageName, ...] = get_args(StageName)
FOLDERS = {"fetch": "source", "prune": "pruned", "dequantise": "plain", "quantise": "quantised", "shard": "shards"}
LOCK = "prepare.lock"
IN_PLACE = "a folder, used in place; a rerun knows it by sizes, times and headers, not by every byte of its weights"


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage did. ``status``: done, not needed, or planned (in a dry run). ``folder``: what the next stage reads;
    ``num_bytes``: of weights in it."""

    stage: StageName
    status: Literal["done", "not needed", "planned", "not asked for"]
    detail: str
    folder: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where what was prepared lies. ``shards``: "" if none were asked for."""

    trainer: str
    engine: str
    shards: str
    stages: tuple[StageResult, ...]


@dataclass
class Preparation:
    """One preparation: ``settings`` of the recipe, with ``source`` and ``target`` in place.
    ``rollout_quantisation``: what ``as_rollout`` means; ``catalogue``: the model's name there, if the source is to have
    its sizes; ``only``: the stages to run, all if it is empty."""

    settings: PrepareConfig
    source: str
    target: Path
    progress: Progress
    rollout_quantisation: Quantisation = "none"
    catalogue: str | None = None
    only: Sequence[StageName] = ()
    workers: int = 2
    restart: bool = False
    dry_run: bool = False
    results: list[StageResult] = field(default_factory=list)
    _commit: str | None = field(default=None, init=False)

    def run(self) -> Prepared:
        """All stages, or those of ``only``. Raises CheckpointError with every reason for a refusal."""
        if self.dry_run and not self._is_local():
            raise CheckpointError(self.source, ["is no folder here (see --source), and a dry run downloads nothing"])
        if self.dry_run:
            return self._planned()[1]
        _refuse_foreign(self.target)
        # A folder is planned before the target is touched: what headers show to be wrong leaves nothing there.
        planned = self._planned() if self._is_local() else None
        with locked(self.target), _one_thread_a_worker():
            work = WorkList(self.target)
            source, _ = planned or self._planned()
            recorded = {"source": self.source if self._commit else "folder", "commit": self._commit}
            work.begin("fetch", recorded, restart=self.restart)
            work.complete("fetch")
            return self._chain(source, work)

    def _is_local(self) -> bool:
        return Path(self.source).expanduser().is_dir()

    def _planned(self) -> tuple[CheckpointIndex, Prepared]:
        """The validated source, and the plan, which has shown every refusal that headers can show."""
        source = self._fetched()
        self._validated(source)
        before = len(self.results)
        plan = self._chain(source, None)
        if not self.dry_run:
            del self.results[before:]
        return source, plan

    def _chain(self, source: CheckpointIndex, work: WorkList | None) -> Prepared:
        """Everything behind validation; without a work list it is planned and nothing is written."""
        inputs = {"source": fingerprint(source)} if work else {}
        pruned, inputs = self._step("prune", self._pruning(), source, inputs, work)
        plain, plain_inputs = self._step("dequantise", self._dequantising(pruned), pruned, inputs, work)
        engine, _ = self._step("quantise", *self._quantising(pruned, plain, inputs, plain_inputs), work)
        shards = self._sharded(plain, plain_inputs, work)
        return Prepared(str(plain.folder), str(engine.folder), shards, tuple(self.results))

    # --- stages ---

    def _fetched(self) -> CheckpointIndex:
        start = time.monotonic()
        folder, self._commit = fetch(self.source, self.settings.revision, self.target / FOLDERS["fetch"])
        commit = self._commit
        detail = f"downloaded, commit {commit}" if commit else IN_PLACE
        index = read_checkpoint(folder)
        self._add("fetch", "done" if commit else "not needed", detail, index, start)
        return index

    def _validated(self, source: CheckpointIndex) -> None:
        start = time.monotonic()
        if self.only and not any(stage in self.only for stage in ("fetch", "validate", "prune", "dequantise")):
            self._add("validate", "not asked for", "", source, start)
            return
        # The catalogue has a pruned copy under its own name; what is published is the whole model.
        name = self.catalogue and self.catalogue.removesuffix(f"-{self.settings.keep_layers}layer")
        shape = None if name is None else model_shape(name)
        report = inspect(source.folder, None if shape is None else expectation_of(shape))
        report.checked()
        compared = "with its own config.json" if shape is None else f"with {name} of the catalogue"
        detail = f"{report.num_tensors} tensors, {report.quantisation}, compared {compared}"
        self._add("validate", "done", "; ".join([detail, *report.notes]), source, start)

    def _pruning(self) -> Transform | str:
        if self.settings.keep_layers is None:
            return "prepare.keep_layers is not set"
        return Prune(self.settings.keep_layers, "keep" if self.settings.keep_mtp else "drop")

    def _dequantising(self, pruned: CheckpointIndex) -> Transform | str:
        return "its weights are plain" if scheme_of(pruned) == "none" else Dequantise()

    def _wanted_scheme(self) -> Quantisation:
        asked = self.settings.quantisation
        return self.rollout_quantisation if asked == "as_rollout" else asked

    def _quantising(
        self, pruned: CheckpointIndex, plain: CheckpointIndex, inputs: dict[str, Any], plain_inputs: dict[str, Any]
    ) -> tuple[Transform | str, CheckpointIndex, dict[str, Any]]:
        """The transform, or why there is none, with its source and that one's inputs."""
        wanted, found = self._wanted_scheme(), scheme_of(pruned)
        if wanted == "none":
            return "the engine's format is none: it loads the trainer's", plain, plain_inputs
        if found == wanted and not is_fnuz(pruned) and not self.settings.high_precision:
            return f"the weights are {found} already, and served as they are", pruned, inputs
        return Quantise(wanted, self.settings.high_precision), plain, plain_inputs

    def _sharded(self, plain: CheckpointIndex, inputs: Mapping[str, Any], work: WorkList | None) -> str:
        start = time.monotonic()
        if not self.settings.shard_ranks:
            self._add("shard", "not needed", "prepare.shard_ranks is 0: the trainer loads the folder", plain, start)
            return ""
        from lockstep.checkpoint.shard import ShardPlan, write_shards

        folder = self.target / FOLDERS["shard"]
        plan = ShardPlan.of(plain, self.settings.shard_ranks)
        if work is None:
            self._add("shard", "planned", f"{self.settings.shard_ranks} ranks", plain, start)
        elif self.only and "shard" not in self.only:
            self._add("shard", "not asked for", "", plain, start)
        else:
            settings = {"ranks": self.settings.shard_ranks}
            work.begin("shard", {**inputs, "settings": settings}, restart=self.restart)
            with TensorReader(plain) as reader:
                write_shards(folder, plan, reader, work, workers=self.workers, progress=self.progress)
            self._add("shard", "done", f"{self.settings.shard_ranks} ranks", plain, start)
        return str(folder)

    # --- one transform ---

    def _step(
        self,
        stage: StageName,
        transform: Transform | str,
        source: CheckpointIndex,
        inputs: dict[str, Any],
        work: WorkList | None,
    ) -> tuple[CheckpointIndex, dict[str, Any]]:
        """Run a transform on ``source``, whose history is ``inputs``. Returns its result, and the history of that."""
        start = time.monotonic()
        if isinstance(transform, str):
            self._add(stage, "not needed", transform, source, start)
            return source, inputs
        folder = self.target / FOLDERS[stage]
        if work is None:
            result = promised(transform, source)
            result = CheckpointIndex(folder, result.config, result.tensors)
            self._add(stage, "planned", "", result, start)
            return result, {}
        asked = not self.only or stage in self.only
        if not asked and not any(STAGES.index(later) > STAGES.index(stage) for later in self.only):
            self._add(stage, "not asked for", "", source, start)
            return source, inputs
        if not asked and not work.is_complete(stage):
            raise CheckpointError(self.target, [f"{stage} comes before {', '.join(self.only)} and is not done: run it"])
        settings = {**transform.settings, "file_bytes": self.settings.file_bytes}
        history = {"settings": settings, "from": inputs}
        # Digests of what was written before: a stage that was not asked for is verified too, as the next one's input.
        work.begin(stage, history, restart=self.restart and asked)
        with TensorReader(source) as reader:
            jobs = folder_jobs(transform, source, reader, reader.files, self.settings.file_bytes)
            done = run_jobs(folder, stage, jobs, work, workers=self.workers, progress=self.progress)
        if "source" in inputs and fingerprint(source) != inputs["source"]:
            for name in done:
                work.forget_file(stage, name)
            raise CheckpointError(source.folder, [f"changed while {stage} read it: what was written is not trusted"])
        result = validated(folder)
        self._add(stage, "done", "", result, start)
        return result, {"stage": stage, "files": _digest_of(done)}

    def _add(self, stage: StageName, status: Any, detail: str, index: CheckpointIndex, start: float) -> None:
        seconds = round(time.monotonic() - start, 3)
        self.results.append(StageResult(stage, status, detail, str(index.folder), weights_bytes(index), seconds))


@contextmanager
def _one_thread_a_worker() -> Iterator[None]:
    """Workers are threads that each compute on one core, and their pages are used again: on some machines the kernel
    takes longer to give a new page than a worker to fill it."""
    import torch

    from lockstep.hardware.allocator import keep_freed_pages, share_one_heap

    keep_freed_pages()
    share_one_heap()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def validated(folder: Path) -> CheckpointIndex:
    """The index of a folder that a stage wrote, held against its own configuration as the source was."""
    return inspect(folder).checked()


def _digest_of(files: Mapping[str, DoneFile]) -> str:
    """One digest of a folder: of the digests of its files."""
    text = json.dumps({name: file.sha256 for name, file in sorted(files.items())})
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold a target folder. Raises CheckpointError if another process does, or for a foreign folder."""
    _refuse_foreign(target)
    target.mkdir(parents=True, exist_ok=True)
    try:
        lock = ProcessLock(target / LOCK)
    except LockedByAnother as error:
        raise CheckpointError(
            target, [f"is being prepared by {error}; wait for it, or choose another target"]
        ) from error
    try:
        yield
    finally:
        lock.release()


def _refuse_foreign(target: Path) -> None:
    """Raise CheckpointError if a target holds what is no preparation: the folders of stages are emptied of strange
    files, which must not be somebody's."""
    if target.exists() and not (target / WORK_LIST).exists() and not (target / LOCK).exists():
        foreign = sorted(path.name for path in target.iterdir()) if target.is_dir() else [target.name]
        if foreign:
            held = ", ".join(foreign[:3])
            raise CheckpointError(target, [f"is no preparation and not empty (it holds {held}); choose another target"])
