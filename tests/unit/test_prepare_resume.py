"""Stages resume by digest: what was cut, changed, or is of another source is written anew or refused, never trusted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from lockstep.checkpoint import writer
from lockstep.checkpoint.errors import CheckpointError
from lockstep.checkpoint.fetch import fetch, fingerprint
from lockstep.checkpoint.headers import read_checkpoint
from lockstep.checkpoint.prepare import LOCK, Preparation, Prepared
from lockstep.checkpoint.progress import Silent
from lockstep.checkpoint.records import OutputGroup, OutputTensor
from lockstep.checkpoint.streaming import plan_files
from lockstep.checkpoint.tensors import DTYPE_WORDS, num_bytes
from lockstep.checkpoint.work_list import WORK_LIST, WorkList
from lockstep.checkpoint.writer import ByteBudget
from lockstep.config.prepare_schema import PrepareConfig
from lockstep.durable import ProcessLock
from tests.synthetic_checkpoints import write_checkpoint

SETTINGS = PrepareConfig(keep_layers=2, quantisation="fp8", file_bytes=35_000)


class Counted(Silent):
    """Remembers what began with how many bytes."""

    def __init__(self) -> None:
        self.begun: dict[str, int] = {}
        self.done = 0

    def begin(self, what: str, total_bytes: int) -> None:
        self.begun[what] = total_bytes

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "source", "qwen3_moe")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def prepare(source: Path, target: Path, config: PrepareConfig = SETTINGS, **options: Any) -> tuple[Prepared, Counted]:
    progress = Counted()
    return Preparation(config, str(source), target, progress, **options).run(), progress


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def written(progress: Counted) -> dict[str, int]:
    return {what: size for what, size in progress.begun.items() if "verifying" not in what and size}


def test_a_second_run_writes_nothing_and_changes_nothing(source: Path, tmp_path: Path) -> None:
    first, progress = prepare(source, tmp_path / "t")
    assert set(written(progress)) == {"prune", "quantise"}
    before = contents(tmp_path / "t")
    second, progress = prepare(source, tmp_path / "t")
    assert written(progress) == {}
    assert contents(tmp_path / "t") == before
    assert (first.trainer, first.engine) == (second.trainer, second.engine)
    assert Path(first.engine, "tokenizer.json").exists()


@pytest.mark.parametrize("fault", ["cut", "flipped", "removed", "same size", "linked", "stranger"])
def test_a_file_that_is_not_what_the_list_says_is_written_anew(fault: str, source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "t")
    before = contents(tmp_path / "t")
    file = tmp_path / "t" / "quantised" / "model-00002-of-00003.safetensors"
    assert file.exists()
    if fault == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif fault == "flipped":
        data = bytearray(file.read_bytes())
        data[-7] ^= 1
        file.write_bytes(data)
    elif fault == "removed":
        file.unlink()
    elif fault == "same size":
        file.write_bytes(bytes(file.stat().st_size))
    elif fault == "linked":
        shutil.move(file, tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        (file.parent / "model-00009-of-00009.safetensors").write_bytes(b"old")
        (file.parent / ".model-00001-of-00003.safetensors.partial").write_bytes(b"half")
    _, progress = prepare(source, tmp_path / "t")
    assert contents(tmp_path / "t") == before
    expected = {} if fault == "stranger" else {"quantise"}
    assert set(written(progress)) == set(expected)


def test_a_file_that_exists_and_was_never_entered_is_not_trusted(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "t")
    before = contents(tmp_path / "t")
    listed = json.loads((tmp_path / "t" / WORK_LIST).read_text())
    removed = listed["stages"]["quantise"]["files"].pop("model-00001-of-00003.safetensors")
    (tmp_path / "t" / WORK_LIST).write_text(json.dumps(listed))
    _, progress = prepare(source, tmp_path / "t")
    assert written(progress)["quantise"] >= removed["bytes"]
    assert contents(tmp_path / "t") == before


def test_another_source_or_other_settings_are_refused_and_restart_begins_anew(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "t")
    before = contents(tmp_path / "t")
    with pytest.raises(CheckpointError, match=r"settings.layers was 2 and is 3.*--restart"):
        prepare(source, tmp_path / "t", SETTINGS.model_copy(update={"keep_layers": 3}))
    with pytest.raises(CheckpointError, match=r"settings.scheme was fp8 and is fp8_ue8m0"):
        prepare(source, tmp_path / "t", SETTINGS.model_copy(update={"quantisation": "fp8_ue8m0"}))
    other = write_checkpoint(tmp_path / "other", "qwen3_moe", seed=1)
    with pytest.raises(CheckpointError, match="changed_ns was"):
        prepare(other, tmp_path / "t")
    assert contents(tmp_path / "t") == before
    prepare(other, tmp_path / "t", restart=True)
    prepare(other, tmp_path / "u")
    assert contents(tmp_path / "t" / "quantised") == contents(tmp_path / "u" / "quantised")
    assert contents(tmp_path / "t" / "quantised") != before


def test_a_source_that_moved_is_the_same_source(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "t")
    moved = source.rename(tmp_path / "moved")
    _, progress = prepare(moved, tmp_path / "t")
    assert written(progress) == {}


def test_a_source_that_changes_while_it_is_read_spoils_the_stage(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = writer.run_jobs

    def touch_after(*arguments: Any, **options: Any) -> Any:
        result = straight(*arguments, **options)
        os.utime(source / "model-00001-of-00003.safetensors", ns=(1, 1))
        return result

    monkeypatch.setattr("lockstep.checkpoint.prepare.run_jobs", touch_after)
    with pytest.raises(CheckpointError, match="changed while prune read it"):
        prepare(source, tmp_path / "t")
    assert not WorkList(tmp_path / "t").is_complete("prune")
    assert WorkList(tmp_path / "t").done("prune") == {}


def test_the_fingerprint_sees_headers_sizes_times_and_side_files(source: Path) -> None:
    seen = [fingerprint(read_checkpoint(source))]
    (source / "tokenizer.json").write_text('{"a": 1}')
    seen.append(fingerprint(read_checkpoint(source)))
    os.utime(source / "model-00002-of-00003.safetensors", ns=(5, 5))
    seen.append(fingerprint(read_checkpoint(source)))
    assert seen[0] != seen[1] != seen[2] != seen[0]


# --- stages alone, locks, folders -------------------------------------------------------------------------------------


def test_one_stage_alone_runs_on_what_was_left_and_refuses_to_skip(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="prune comes before quantise and is not done"):
        prepare(source, tmp_path / "t", only=("quantise",))
    result, progress = prepare(source, tmp_path / "t", only=("prune",))
    assert set(written(progress)) == {"prune"}
    assert {one.stage: one.status for one in result.stages}["quantise"] == "not asked for"
    _, progress = prepare(source, tmp_path / "t", only=("quantise",))
    assert set(written(progress)) == {"quantise"}
    before = contents(tmp_path / "t")
    _, progress = prepare(source, tmp_path / "t", only=("quantise",), restart=True)
    assert set(written(progress)) == {"quantise"}
    assert contents(tmp_path / "t") == before


def test_a_damaged_input_is_mended_before_the_stage_that_reads_it(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "t")
    before = contents(tmp_path / "t")
    pruned = next((tmp_path / "t" / "pruned").glob("*.safetensors"))
    pruned.write_bytes(bytes(pruned.stat().st_size))
    prepare(source, tmp_path / "t", only=("quantise",), restart=True)
    assert contents(tmp_path / "t") == before


def test_a_dry_run_writes_nothing_and_knows_the_sizes(source: Path, tmp_path: Path) -> None:
    planned, _ = prepare(source, tmp_path / "t", dry_run=True)
    assert not (tmp_path / "t").exists()
    done, _ = prepare(source, tmp_path / "t")
    sizes = [[(one.stage, one.num_bytes, one.folder) for one in result.stages] for result in (planned, done)]
    assert sizes[0] == sizes[1]
    assert (planned.trainer, planned.engine) == (done.trainer, done.engine)


@pytest.mark.parametrize("existing", [True, False])
def test_a_refused_source_leaves_the_target_as_it_was(existing: bool, source: Path, tmp_path: Path) -> None:
    """A file that is not a tensor's, and a scheme that the family does not have: both are known before a write."""
    target = tmp_path / "t"
    if existing:
        target.mkdir()
    (source / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        Preparation(SETTINGS, str(source), target, Silent()).run()
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="below 6"):
        Preparation(SETTINGS.model_copy(update={"keep_layers": 99}), str(source), target, Silent()).run()
    assert target.exists() == existing
    assert not existing or list(target.iterdir()) == []


def test_two_preparations_of_one_target_do_not_meet(source: Path, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    lock = ProcessLock(tmp_path / "t" / LOCK)
    try:
        with pytest.raises(CheckpointError, match="being prepared by this process"):
            prepare(source, tmp_path / "t")
    finally:
        lock.release()
    prepare(source, tmp_path / "t")


def test_a_folder_that_is_somebodys_is_not_touched(source: Path, tmp_path: Path) -> None:
    for held in ("quantised/model.safetensors", "notes.txt"):
        target = tmp_path / held.replace("/", "-")
        (target / held).parent.mkdir(parents=True, exist_ok=True)
        (target / held).write_text("mine")
        with pytest.raises(CheckpointError, match="no preparation and not empty"):
            prepare(source, target)
        assert contents(target) == {held: b"mine"}


def test_a_broken_work_list_is_for_the_user_to_judge(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "t")
    for text in ("{", '{"format": 2, "stages": {}}', "[]"):
        (tmp_path / "t" / WORK_LIST).write_text(text)
        with pytest.raises(CheckpointError, match=r"prepare.json.*\n.*\n.*can't be read"):
            prepare(source, tmp_path / "t")


def test_workers_make_the_same_bytes_in_any_number(source: Path, tmp_path: Path) -> None:
    for workers in (1, 4):
        prepare(source, tmp_path / f"t{workers}", workers=workers)
    one, four = (contents(tmp_path / f"t{workers}" / "quantised") for workers in (1, 4))
    assert one == four


# --- disk ------------------------------------------------------------------------------------------------------------


def test_a_disk_without_room_is_seen_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"prune needs [\d,]+ bytes and the disk has 1,000"):
        prepare(source, tmp_path / "t")
    assert not list((tmp_path / "t" / "pruned").iterdir())


def test_a_disk_that_fills_up_in_a_write_keeps_what_is_finished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(G16: a full disk at the last save lost the run.)"""
    real, room = os.pwrite, [150_000]

    def limited(descriptor: int, data: Any, offset: int) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", limited)
    with pytest.raises(CheckpointError, match=r"the disk filled up during prune .*run the same command again"):
        prepare(source, tmp_path / "t", workers=1)
    finished = WorkList(tmp_path / "t").done("prune")
    assert finished
    assert not list((tmp_path / "t" / "pruned").glob(".*"))
    room[0] = 1 << 40
    result, progress = prepare(source, tmp_path / "t")
    assert progress.begun["prune: verifying"] == sum(file.bytes for file in finished.values())
    monkeypatch.undo()
    prepare(source, tmp_path / "u")
    assert contents(Path(result.engine)) == contents(tmp_path / "u" / "quantised")


def test_a_file_size_limit_is_a_clear_error_of_the_command(source: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
        "from lockstep.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "prepare", "tiny-qwen3-moe", "--source", str(source)]
    command += ["--target", str(tmp_path / "t"), "--set", "prepare.quantisation=fp8", "--json"]
    # Standard streams are pipes: the limit would hold for files.
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 1, done.stderr
    assert "the disk filled up during quantise" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# --- parts ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_planned_files_are_what_safetensors_reads(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool])
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    drawn = data.draw(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=8))
    groups = [
        OutputGroup((OutputTensor(f"t{i}", DTYPE_WORDS[dtype], shape, ()),)) for i, (dtype, shape) in enumerate(drawn)
    ]
    limit = data.draw(st.integers(1, 400))
    files = plan_files(groups, limit)
    assert [g for file in files for g in file.groups] == groups
    folder = tmp_path_factory.mktemp("planned")
    for file in files:
        sizes = [num_bytes(t.dtype, t.shape) for g in file.groups for t in g.tensors]
        assert len(sizes) == 1 or sum(sizes) <= limit
        content = bytearray(file.header) + bytearray(file.num_bytes - len(file.header))
        for group in file.groups:
            (tensor,) = group.tensors
            begin = file.offsets[tensor.name]
            content[begin : begin + num_bytes(tensor.dtype, tensor.shape)] = bytes(
                [int(tensor.name[1:]) % 2] * num_bytes(tensor.dtype, tensor.shape)
            )
        (folder / file.name).write_bytes(content)
        with safe_open(folder / file.name, framework="pt") as opened:
            for group in file.groups:
                (tensor,) = group.tensors
                read = opened.get_tensor(tensor.name)
                assert (DTYPE_WORDS[read.dtype], tuple(read.shape)) == (tensor.dtype, tensor.shape)
                assert set(read.reshape(-1).view(torch.uint8).tolist()) <= {int(tensor.name[1:]) % 2}


def test_names_that_are_promised_twice_and_unwritable_dtypes_are_refused() -> None:
    one = OutputGroup((OutputTensor("a", "F32", (1,), ()), OutputTensor("a", "F4", (2,), ())))
    with pytest.raises(CheckpointError) as refused:
        plan_files([one], 100)
    assert {problem.kind for problem in refused.value.problems} == {
        "tensor promised twice",
        "dtype that can't be written",
    }


def test_the_budget_holds_and_a_need_above_it_is_served_alone() -> None:
    budget, lock = ByteBudget(100), threading.Lock()
    used, peaks = [0], list[tuple[int, int]]()

    def work(need: int) -> None:
        for _ in range(50):
            with budget.taken(need):
                with lock:
                    used[0] += need
                    peaks.append((used[0], need))
                with lock:
                    used[0] -= need

    threads = [threading.Thread(target=work, args=(need,)) for need in (30, 60, 90, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(peaks) == 200
    assert all(total <= 100 or total == need == 250 for total, need in peaks)


def test_no_network_and_no_such_folder_have_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match=r"the hub did not give it .*copy the folder here and give it as --source"
    ):
        fetch("Qwen/Qwen3-30B-A3B", None, tmp_path / "t")
    with pytest.raises(CheckpointError, match="is no folder, and no name on the hub"):
        fetch("no/such/folder", None, tmp_path / "t")
    with pytest.raises(CheckpointError, match=r"prepare.revision = 'main' has no meaning"):
        fetch(str(tmp_path), "main", tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_download_takes_no_pickles_and_pins_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Api:
        def model_info(self, name: str, revision: str | None) -> Any:
            return type("Info", (), {"sha": f"{name}@{revision}"})

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: asked.update(options, name=name))
    assert fetch("a/b", "main", tmp_path) == (tmp_path, "a/b@main")
    assert asked["revision"] == "a/b@main"
    assert asked["local_dir"] == tmp_path
    assert not [p for p in asked["allow_patterns"] if p.endswith((".bin", ".pt", ".pth", ".pkl", ".py", "*"))][:-1]


def test_results_do_not_depend_on_how_the_files_are_cut(source: Path, tmp_path: Path) -> None:
    whole = replace(Preparation(SETTINGS, str(source), tmp_path / "t", Silent()))
    whole.settings = SETTINGS.model_copy(update={"file_bytes": 1 << 30})
    folders = [Path(whole.run().engine), Path(prepare(source, tmp_path / "u")[0].engine)]
    tensors: list[dict[str, bytes]] = []
    for folder in folders:
        index = read_checkpoint(folder)
        tensors.append({
            name: (folder / entry.file).read_bytes()[entry.begin : entry.end] for name, entry in index.tensors.items()
        })  # fmt: skip
    assert tensors[0] == tensors[1]
    assert len(list(folders[0].glob("*.safetensors"))) == 1
