"""A run folder survives crashes, full disks, second writers and stubborn file systems."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lockstep.metrics import checkpoints
from lockstep.metrics.checkpoints import MARKER, CheckpointError, Checkpoints
from lockstep.metrics.run_folder import RunFolder, RunFolderError, read_rollouts, rollout_steps
from lockstep.metrics.sinks import read_jsonl
from lockstep.records import compact_routes, signed_routes
from tests.synthetic_run import make_rollout, noisy, token_texts

PAYLOAD = {"weights.bin": b"w" * 5000, "optimizer/state.bin": b"o" * 9000, "progress.json": b'{"cursor": 7}'}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder(tmp_path / "run") as opened:
        yield opened


def fill(path: Path, step: int) -> None:
    """A checkpoint whose every byte tells its step."""
    for name, content in PAYLOAD.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content + str(step).encode())


def save(folder: RunFolder | Checkpoints, step: int) -> None:
    store = folder.checkpoints if isinstance(folder, RunFolder) else folder
    with store.saving(step, required=tuple(PAYLOAD)) as path:
        fill(path, step)


def assert_whole(step: int, path: Path) -> None:
    assert path.name == f"step-{step:06d}"
    for name, content in PAYLOAD.items():
        assert (path / name).read_bytes() == content + str(step).encode()


# --- the folder and its lock ---


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom lockstep.metrics.run_folder import RunFolder\n"
        "folder = RunFolder(sys.argv[1])\nprint('held', flush=True)\nsys.stdin.read()"
    )
    path = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=rf"in use by another process \(pid {process.pid} on "):
            RunFolder(path)
    finally:
        process.kill()
        process.communicate()
    RunFolder(path).close()  # the lock died with its process


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom lockstep.metrics.run_folder import RunFolder\nfolder = RunFolder(sys.argv[1])\n"
        "child = os.fork()\nif child == 0:\n    sys.stdin.read()\n    os._exit(0)\n"
        "print(child, flush=True)\nos._exit(0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.wait()
    os.kill(child, 0)  # still there
    RunFolder(tmp_path / "run").close()
    process.communicate()


def test_the_same_process_cannot_open_a_folder_twice(folder: RunFolder) -> None:
    with pytest.raises(RunFolderError, match="already open in this process"):
        RunFolder(folder.path)


def test_a_closed_folder_can_be_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        with RunFolder(tmp_path / "run") as folder:
            folder.close()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(RunFolderError, match=r"holds thesis\.tex"):
        RunFolder(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder(tmp_path / "run")


def test_config_and_environment_are_written_whole_and_an_earlier_config_is_kept(folder: RunFolder) -> None:
    assert folder.config_text() is None
    folder.write_config("steps = 1\n")
    folder.write_config("steps = 1\n")
    assert not (folder.path / "superseded").exists()
    folder.write_config("steps = 2\n")
    assert folder.config_text() == "steps = 2\n"
    assert (folder.path / "superseded/000001/config.toml").read_text() == "steps = 1\n"
    folder.write_environment({"torch": "2.13", "loss": math.nan})
    assert json.loads((folder.path / "environment.json").read_text()) == {"torch": "2.13", "loss": "NaN"}


def test_a_failed_replace_leaves_the_old_config_and_no_temporary_file(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_config("old")
    before = {entry.name for entry in folder.path.iterdir()} | {"superseded"}

    def refuse(source: object, target: object) -> None:
        if str(target).endswith("run/config.toml"):
            raise OSError(errno.EIO, "broken")
        real(source, target)

    real = os.replace
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="broken"):
        folder.write_config("new")
    assert folder.config_text() == "old"
    assert {entry.name for entry in folder.path.iterdir()} == before


# --- rows ---


def test_a_metric_that_breaks_the_law_is_refused_and_nothing_is_written(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="'Loss'"):
        folder.append_metrics({"step": 1, "Loss": 1.0})
    folder.append_metrics({"step": np.int64(1), "loss": np.float32(math.nan)})
    assert [math.isnan(row["loss"]) for row in folder.metrics()] == [True]  # type: ignore[arg-type]


def test_a_receipt_needs_its_step(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="'step'"):
        folder.append_refit({"version": 3})


# --- rollouts ---


def test_rollouts_come_back_as_they_were(folder: RunFolder) -> None:
    rollouts = [make_rollout("r0", "g0", ["a", "b", "\n"]), make_rollout("r1", "g0", ["c"], right=False)]
    logprobs = noisy(rollouts[0], 0.01)
    logprobs["r0/0"][3] = np.inf
    path = folder.write_rollouts(7, rollouts, logprobs, token_texts)
    assert path == folder.path / "rollouts/step-000007.parquet"
    first, second = folder.read_rollouts(7)
    for name in ("tokens", "loss_mask", "logprobs", "versions", "kv_versions"):
        written, read = getattr(rollouts[0].sequences[0], name), getattr(first.sequence, name)
        np.testing.assert_array_equal(read, written)
        assert read.dtype == written.dtype
    np.testing.assert_array_equal(first.train_logprobs, logprobs["r0/0"])
    assert first.token_texts is not None
    assert first.token_texts[2:] == ("a", "b", "\n")
    assert (first.step, first.rollout_id, first.group_id, first.problem_id) == (7, "r0", "g0", "g0")
    assert (first.reward, first.correct, first.parts["right"]) == (1.2, True, 1.0)
    assert second.train_logprobs is None
    assert second.correct is False
    assert rollout_steps(folder.path) == [7]


@pytest.mark.parametrize("num_experts", [128, 255, 256, 384])
def test_routes_and_abstaining_rewards_survive(folder: RunFolder, num_experts: int) -> None:
    plain = make_rollout("r0", "g0", ["a", "b"])
    ids = np.arange(3 * 2 * 4).reshape(3, 2, 4)
    ids[0], ids[2, 1, 3] = -1, num_experts - 1
    routes = compact_routes(ids, num_experts)
    sequence = dataclasses.replace(plain.sequences[0], routes=routes)
    score = dataclasses.replace(plain.score, reward=None, correct=None, error="grader died", parts={"x": None})
    folder.write_rollouts(1, [dataclasses.replace(plain, sequences=(sequence,), score=score)], {})
    (read,) = read_rollouts(folder.path, 1)
    assert read.sequence.routes is not None
    assert read.sequence.routes.dtype == (np.uint8 if num_experts <= 255 else np.uint16)
    np.testing.assert_array_equal(signed_routes(read.sequence.routes), ids)
    assert (read.reward, read.correct, read.score_error, read.parts) == (None, None, "grader died", {"x": None})


def test_wrong_lengths_and_unknown_ids_are_refused(folder: RunFolder) -> None:
    rollout = make_rollout("r0", "g0", ["a"])
    with pytest.raises(ValueError, match="r0/0: train_logprobs has 2 entries for 3 tokens"):
        folder.write_rollouts(1, [rollout], {"r0/0": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="in no rollout: other"):
        folder.write_rollouts(1, [rollout], {"other": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="token_texts has 0 entries"):
        folder.write_rollouts(1, [rollout], {}, lambda tokens: [])
    assert rollout_steps(folder.path) == []


def test_a_crash_while_writing_rollouts_leaves_the_earlier_file(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_rollouts(1, [make_rollout("r0", "g0", ["a"])], {})
    monkeypatch.setattr(pq, "write_table", lambda table, path, **_: (Path(path).write_bytes(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        folder.write_rollouts(1, [make_rollout("r1", "g0", ["b"])], {})
    assert [row.rollout_id for row in folder.read_rollouts(1)] == ["r0"]
    assert [entry.name for entry in (folder.path / "rollouts").iterdir()] == ["step-000001.parquet"]


def test_asking_for_a_missing_step_names_those_there_are(folder: RunFolder) -> None:
    with pytest.raises(FileNotFoundError, match="none are recorded"):
        folder.read_rollouts(3)
    folder.write_rollouts(1, [make_rollout("r0", "g0", ["a"])], {})
    with pytest.raises(FileNotFoundError, match=r"no rollouts of step 3; recorded: 1 to 1 \(1 steps\)"):
        folder.read_rollouts(3)


# --- checkpoints ---


def test_latest_is_the_newest_complete_one(folder: RunFolder) -> None:
    assert folder.latest_checkpoint() is None
    for step in (5, 10):
        fill(folder.checkpoints.begin(step), step)
        assert folder.checkpoints.finish(step, PAYLOAD) == folder.path / f"checkpoints/step-{step:06d}"
    latest = folder.latest_checkpoint()
    assert latest is not None
    assert latest[0] == 10
    assert_whole(*latest)


def test_a_part_that_was_not_copied_never_gets_the_marker(folder: RunFolder) -> None:
    """Fault G9: the weights disappear during the save."""
    save(folder, 5)
    for broken in (lambda path: (path / "weights.bin").unlink(), lambda path: (path / "weights.bin").write_bytes(b"")):
        path = folder.checkpoints.begin(10)
        fill(path, 10)
        broken(path)
        with pytest.raises(CheckpointError, match=r"missing or empty: weights\.bin.*last good .*step-000005"):
            folder.checkpoints.finish(10, PAYLOAD)
        assert not (path / MARKER).exists()
        assert folder.latest_checkpoint() == (5, folder.checkpoints.path(5))


def test_an_empty_checkpoint_is_refused(folder: RunFolder) -> None:
    folder.checkpoints.begin(1)
    with pytest.raises(CheckpointError, match="it has no files"):
        folder.checkpoints.finish(1)


def test_an_error_inside_a_save_removes_it_and_is_raised(folder: RunFolder) -> None:
    save(folder, 5)

    def save_without_weights() -> None:
        with folder.saving_checkpoint(10) as path:
            fill(path, 10)
            raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        save_without_weights()
    assert [entry.name for entry in folder.checkpoints.root.iterdir()] == ["step-000005"]


def test_one_still_being_written_is_never_chosen_and_removed_at_the_next_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Faults G9 and G13: a crash leaves a folder with a higher number."""
    with RunFolder(tmp_path / "run") as folder:
        save(folder, 5)
        fill(folder.checkpoints.begin(10), 10)
        assert folder.latest_checkpoint() == (5, folder.checkpoints.path(5))
    with caplog.at_level(logging.WARNING), RunFolder(tmp_path / "run") as folder:
        assert "left by a save that did not finish" in caplog.text
        assert [entry.name for entry in folder.checkpoints.root.iterdir()] == ["step-000005"]


def damage_truncate(path: Path) -> None:
    content = (path / "optimizer/state.bin").read_bytes()
    (path / "optimizer/state.bin").write_bytes(content[: len(content) // 2])


def damage_flip(path: Path) -> None:
    content = bytearray((path / "weights.bin").read_bytes())
    content[100] ^= 1
    (path / "weights.bin").write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut to half": (damage_truncate, r"optimizer/state\.bin has 4,501 bytes instead of 9,002"),
    "one bit": (damage_flip, r"weights\.bin differs from its checksum"),
    "missing file": (lambda path: (path / "progress.json").unlink(), r"progress\.json is missing"),
    "no marker": (lambda path: (path / MARKER).unlink(), f"it has no {MARKER}"),
    "cut marker": (lambda path: (path / MARKER).write_text('{"files": {'), "can't be read"),
    "marker of another kind": (lambda path: (path / MARKER).write_text("[]"), "can't be read"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_falls_back_to_the_last_good_one_and_says_why(
    folder: RunFolder, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Fault G13: cut the last file to half."""
    damage, reason = DAMAGES[kind]
    save(folder, 5)
    save(folder, 10)
    damage(folder.checkpoints.path(10))
    with caplog.at_level(logging.WARNING):
        latest = folder.latest_checkpoint()
    assert latest is not None
    assert_whole(*latest)
    assert latest[0] == 5
    assert "falling back to step 5" in caplog.text
    assert re.search(reason, caplog.text)
    save(folder, 10)  # and the damaged one can be replaced
    latest = folder.latest_checkpoint()
    assert latest is not None
    assert_whole(*latest)
    assert latest[0] == 10


def test_only_damaged_checkpoints_stop_the_run_instead_of_starting_afresh(folder: RunFolder) -> None:
    save(folder, 5)
    (folder.checkpoints.path(5) / "weights.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no usable checkpoint: .*step 5 is damaged \(weights\.bin is missing\)"):
        folder.latest_checkpoint()


def test_files_that_were_not_saved_with_it_are_reported(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Fault G17: what is there beyond the list is said, not passed over."""
    save(folder, 5)
    (folder.checkpoints.path(5) / "layer-12.bin").write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        assert folder.latest_checkpoint() is not None
    assert "files that were not saved with it: layer-12.bin" in caplog.text


def test_a_good_checkpoint_is_never_overwritten(folder: RunFolder) -> None:
    save(folder, 5)
    with pytest.raises(CheckpointError, match="already has a complete checkpoint"):
        folder.checkpoints.begin(5)


def test_large_files_are_checked_by_size(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SHA256_MAX_BYTES", 100)
    save(folder, 5)
    listed = json.loads((folder.checkpoints.path(5) / MARKER).read_text())["files"]
    assert [name for name, entry in listed.items() if "sha256" in entry] == ["progress.json"]
    damage_truncate(folder.checkpoints.path(5))
    assert folder.checkpoints.problems(5) == ["optimizer/state.bin has 4,500 bytes instead of 9,001"]


def test_every_file_is_on_the_disk_before_the_marker_and_the_marker_before_the_name(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync, rename, replace = os.fsync, os.rename, os.replace
    root = folder.checkpoints.root

    def fsync(descriptor: int) -> None:
        order.append("sync " + os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), root))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(f"name {Path(b).name}"), replace(a, b)))
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append(f"name {Path(b).name}"), rename(a, b)))
    save(folder, 5)
    partial = ".step-000005.partial"
    for name in PAYLOAD:
        assert order.index(f"sync {partial}/{name}") < order.index(f"name {MARKER}")
    assert order.index(f"sync {partial}/optimizer") < order.index(f"name {MARKER}")
    assert order.index(f"sync {partial}/.{MARKER}.partial") < order.index(f"name {MARKER}")
    assert order.index(f"name {MARKER}") < order.index("name step-000005") < len(order) - 1
    assert order[-1] == "sync ."


class Crash(BaseException):
    """The process dies here: nothing after it runs."""


@contextmanager
def crashing_at(call: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the process die right before the n-th call that changes the disk."""
    calls: list[str] = []

    def wrap(module: object, name: str) -> None:
        real = getattr(module, name)

        def dying(*args: object, **kwargs: object) -> object:
            calls.append(name)
            if len(calls) >= call:
                raise Crash
            return real(*args, **kwargs)

        patch.setattr(module, name, dying)

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
            wrap(os, name)
        wrap(shutil, "rmtree")
        yield calls


def test_a_crash_at_any_call_of_save_and_prune_leaves_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault G13, exhaustively: whichever disk operation is the last one, step 10 or step 15 is whole afterwards."""
    outcomes: list[int] = []
    for call in range(1, 200):
        root = tmp_path / f"run-{call}"
        store = Checkpoints(root)
        for step in (5, 10):
            save(store, step)
        died = False
        with crashing_at(call, monkeypatch) as calls:
            try:
                save(store, 15)
                store.prune(keep=1)
            except Crash:
                died = True
        store = Checkpoints(root)
        store.recover()
        latest = store.latest()
        assert latest is not None
        assert_whole(*latest)
        assert latest[0] in (10, 15)
        outcomes.append(latest[0])
        assert not [entry for entry in root.iterdir() if entry.name.startswith(".")]
        if not died:
            assert call > 15, calls
            break
    else:
        pytest.fail("the save never came through")
    assert outcomes[0] == 10
    assert outcomes[-1] == 15
    assert outcomes == sorted(outcomes)


def test_a_reader_of_checkpoints_changes_nothing_while_a_save_goes_on(tmp_path: Path) -> None:
    """Every reading method, on a folder with a good, a damaged, a half-written and a half-deleted checkpoint."""
    with RunFolder(tmp_path / "run") as folder:
        root = folder.checkpoints.root
        for step in (1, 2):
            save(folder.checkpoints, step)
        (root / "step-000002" / "complete.json").unlink()
        (root / ".step-000000.deleting").mkdir()
        with folder.saving_checkpoint(3) as partial:
            (partial / "model.bin").write_bytes(b"m")
            before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
            reader = Checkpoints(root)
            assert (reader.steps(), reader.has(1), reader.has(2)) == ([1, 2], True, False)
            assert reader.latest() == (1, root / "step-000001")
            assert reader.problems(2)
            assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
        assert Checkpoints(root).latest() == (3, root / "step-000003")
    RunFolder(folder.path).close()
    assert not list(root.glob(".*")), "what a crash left is removed by the next run"


def test_a_missing_checkpoint_folder_reads_as_no_checkpoints_and_is_not_made(tmp_path: Path) -> None:
    reader = Checkpoints(tmp_path / "run" / "checkpoints")
    assert (reader.steps(), reader.latest(), reader.has(1)) == ([], None, False)
    assert reader.problems(1) == ["it has no complete.json"]
    assert not list(tmp_path.iterdir())
    save(reader, 1)  # a writer needs no call beforehand
    assert reader.latest() == (1, reader.path(1))


@pytest.mark.parametrize("seed", range(3))
def test_sigkill_at_random_moments_leaves_a_good_checkpoint_and_whole_rows(tmp_path: Path, seed: int) -> None:
    """A process saves and appends as fast as it can and is killed, again and again, in one folder."""
    script = (
        "import sys\nfrom lockstep.metrics.run_folder import RunFolder\n"
        "folder = RunFolder(sys.argv[1])\nlatest = folder.latest_checkpoint()\nstep = latest[0] if latest else 0\n"
        "folder.rewind(step if latest else -1)\nprint('go', flush=True)\n"
        "while True:\n    step += 1\n    folder.append_metrics({'step': step, 'text': 'x' * 3000})\n"
        "    with folder.saving_checkpoint(step, required=('a.bin', 'b.bin')) as path:\n"
        "        for name in ('a.bin', 'b.bin'):\n            (path / name).write_bytes(str(step).encode() * 20000)\n"
        "    folder.prune_checkpoints(2)\n"
    )
    rng = random.Random(seed)
    path, reached = tmp_path / "run", 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        time.sleep(rng.uniform(0.02, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with RunFolder(path) as folder:
            latest = folder.latest_checkpoint()
            steps = [row["step"] for row in folder.metrics()]
        assert steps == list(range(1, len(steps) + 1))
        step = latest[0] if latest else 0
        assert reached <= step <= len(steps) <= step + 1
        if latest:
            for name in ("a.bin", "b.bin"):
                assert (latest[1] / name).read_bytes() == str(step).encode() * 20000
        reached = step
    assert reached > 0


# --- space ---


def test_space_is_checked_before_a_byte_is_written(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault G16: the third save of a small quota."""
    save(folder, 5)
    usage = shutil.disk_usage(folder.path)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"2,000 bytes needed, 1,000 free.*last good checkpoint is .*step-000005"):
        folder.checkpoints.begin(10, estimate_bytes=2_000)
    assert [entry.name for entry in folder.checkpoints.root.iterdir()] == ["step-000005"]
    folder.checkpoints.begin(10, estimate_bytes=1_000)


def test_a_disk_that_really_fills_up_keeps_the_last_good_checkpoint(folder: RunFolder) -> None:
    """Fault G16: the kernel refuses the bytes in the middle of a file."""
    save(folder, 5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (7_000, limits[1]))
        with pytest.raises(CheckpointError, match=r"filled up while the checkpoint of step 10.*step-000005") as caught:
            save(folder, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert isinstance(caught.value.__cause__, OSError)
    assert [entry.name for entry in folder.checkpoints.root.iterdir()] == ["step-000005"]
    save(folder, 10)
    assert folder.latest_checkpoint() == (10, folder.checkpoints.path(10))


def test_no_space_at_any_disk_call_of_a_save_keeps_the_last_good_checkpoint(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 5)
    for name in ("fsync", "replace", "rename"):
        with monkeypatch.context() as patch:

            def full(*_args: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(os, name, full)
            with pytest.raises(CheckpointError, match=r"No space left on device.*step-000005"):
                save(folder, 10)
        assert [entry.name for entry in folder.checkpoints.root.iterdir()] == ["step-000005"]


# --- pruning ---


def test_prune_keeps_the_newest_good_ones(folder: RunFolder) -> None:
    for step in (1, 2, 3, 4):
        save(folder, step)
    assert folder.prune_checkpoints(2) == [1, 2]
    assert folder.checkpoints.steps() == [3, 4]
    with pytest.raises(ValueError, match="at least one"):
        folder.prune_checkpoints(0)


def test_prune_counts_only_good_ones_and_never_the_last_good_one(folder: RunFolder) -> None:
    for step in (1, 2, 3, 4):
        save(folder, step)
    for step in (2, 4):
        damage_truncate(folder.checkpoints.path(step))
    assert folder.prune_checkpoints(2) == [2]
    assert folder.prune_checkpoints(1) == [1]
    assert folder.checkpoints.steps() == [3, 4]  # 3 is the last good one; 4, newer and damaged, is evidence
    damage_truncate(folder.checkpoints.path(3))
    assert folder.prune_checkpoints(1) == []


@pytest.mark.parametrize("call", ["rename", "rmtree"])
def test_a_deletion_that_fails_warns_and_is_tried_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """Fault G11: a file of the old checkpoint is in use on a network disk."""
    for step in (1, 2):
        save(folder, step)

    def busy(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os if call == "rename" else shutil, call, busy)
        folder.prune_checkpoints(1)
    assert "trying again later" in caplog.text
    assert folder.latest_checkpoint() == (2, folder.checkpoints.path(2))
    folder.prune_checkpoints(1)
    assert [entry.name for entry in folder.checkpoints.root.iterdir()] == ["step-000002"]


# --- rewind ---


def test_a_rewind_to_before_the_first_step_says_that_the_run_starts_again(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.append_metrics({"step": 1})
    folder.rewind(-1)
    assert "starting again: no step had been saved" in caplog.messages[-1]
    assert "after step" not in caplog.messages[-1]


def test_rewind_moves_everything_after_the_step_aside(folder: RunFolder) -> None:
    for step in range(1, 5):
        folder.append_metrics({"step": step, "loss": float(step)})
        folder.append_refit({"step": step, "version": step})
        folder.write_rollouts(step, [make_rollout(f"r{step}", "g", ["a"])], {})
        save(folder, step)
    aside = folder.rewind(2)
    assert aside == folder.path / "superseded/000001"
    assert [row["step"] for row in folder.metrics()] == [1, 2]
    assert [row["step"] for row in folder.refits()] == [1, 2]
    assert rollout_steps(folder.path) == folder.checkpoints.steps() == [1, 2]
    assert [row["step"] for row in read_jsonl(aside / "metrics.jsonl")] == [3, 4]
    assert [row["step"] for row in read_jsonl(aside / "refits.jsonl")] == [3, 4]
    assert {"step-000003.parquet", "step-000004.parquet", "checkpoint-step-000004"} <= {p.name for p in aside.iterdir()}
    folder.append_metrics({"step": 3})
    assert folder.rewind(3) is None
    assert folder.rewind(-1) == folder.path / "superseded/000002"
    assert folder.metrics() == []


def test_a_rewind_that_dies_anywhere_loses_nothing_and_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in range(1, 100):
        path = tmp_path / f"run-{call}"
        with RunFolder(path) as folder:
            for step in range(1, 4):
                folder.append_metrics({"step": step})
                folder.append_refit({"step": step})
                folder.write_rollouts(step, [make_rollout("r", "g", ["a"])], {})
            died = False
            with crashing_at(call, monkeypatch):
                try:
                    folder.rewind(1)
                except Crash:
                    died = True
        with RunFolder(path) as folder:
            folder.rewind(1)
            assert [row["step"] for row in folder.metrics()] == [row["step"] for row in folder.refits()] == [1]
            assert rollout_steps(path) == [1]
        moved = sorted(file.name for file in path.glob("superseded/*/step-*.parquet"))
        assert moved == ["step-000002.parquet", "step-000003.parquet"]
        for name in ("metrics.jsonl", "refits.jsonl"):
            rows = [row["step"] for file in path.glob(f"superseded/*/{name}") for row in read_jsonl(file)]
            assert set(rows) == {2, 3}
        if not died:
            return
    pytest.fail("the rewind never came through")
