"""A run that is killed, interrupted or out of disk continues as if nothing had happened."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lockstep.metrics.checkpoints import Checkpoints
from lockstep.metrics.sinks import read_jsonl
from tests.e2e.conftest import SMALL, assert_same_run, run, stable_rows, start

pytestmark = pytest.mark.slow


def wait_for(process: subprocess.Popen[str], condition, timeout_s: float = 120) -> bool:
    """Poll until the condition holds (True) or the process ends (False)."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None:
        if condition():
            return True
        assert time.monotonic() < deadline, "the run neither ended nor got there"
        time.sleep(0.002)
    return False


def rows_in(run_dir: Path) -> int:
    return len(read_jsonl(run_dir / "metrics.jsonl")) if (run_dir / "metrics.jsonl").exists() else 0


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_same_configuration_gives_the_same_run(straight_run: Path, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "again")
    assert code == 0, err
    assert_same_run(straight_run, tmp_path / "again")


def test_killed_between_steps_and_inside_a_save_it_ends_like_the_straight_run(
    straight_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "killed"
    partial = [run_dir / "checkpoints" / f".step-{step:06d}.partial" for step in (2, 4)]

    first = start(run_dir)  # inside the first save
    assert wait_for(first, lambda: any(partial[0].parent.glob("*partial*")) if partial[0].parent.exists() else False)
    kill(first)
    second = start(run_dir)  # at a random moment after step 3
    assert wait_for(second, lambda: rows_in(run_dir) >= 4)
    time.sleep(random.Random(1).uniform(0, 0.3))
    kill(second)
    third = start(run_dir)  # inside a later save
    before = set(partial[0].parent.iterdir())
    wait_for(third, lambda: any("partial" in entry.name for entry in set(partial[0].parent.iterdir()) - before))
    kill(third)
    code, _, err = run(run_dir)
    assert code == 0, err
    assert_same_run(straight_run, run_dir)


def test_a_finished_run_says_that_it_is_finished(straight_run: Path) -> None:
    rows = stable_rows(straight_run)
    code, out, err = run(straight_run)
    assert code == 0
    assert "finished at step 6 of 6" in err
    assert "report:" in out
    assert stable_rows(straight_run) == rows


def test_resume_with_another_configuration_is_refused_by_key(straight_run: Path) -> None:
    code, _, err = run(straight_run, [*SMALL, "trainer.learning_rate=0.5"])
    assert code == 2
    assert "trainer.learning_rate" in err
    assert "0.5" in err


def test_ctrl_c_finishes_the_step_saves_and_the_resumed_run_is_equal(straight_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "interrupted"
    settings = [*SMALL, "checkpoint.every=100"]
    process = start(run_dir, settings)
    assert wait_for(process, lambda: rows_in(run_dir) >= 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "resume with: lockstep train" in err
    latest = Checkpoints(run_dir / "checkpoints").latest()
    assert latest is not None
    assert latest[0] == read_jsonl(run_dir / "metrics.jsonl")[-1]["step"]
    code, _, err = run(run_dir, settings)
    assert code == 0, err
    assert_same_run(straight_run, run_dir)


def test_second_ctrl_c_stops_at_once_and_loses_at_most_the_step(straight_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "twice"
    settings = [*SMALL, "checkpoint.every=100"]
    process = start(run_dir, settings)
    assert wait_for(process, lambda: rows_in(run_dir) >= 3)
    finished = read_jsonl(run_dir / "metrics.jsonl")[-1]["step"]
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    latest = Checkpoints(run_dir / "checkpoints").latest()
    assert latest is not None
    assert latest[0] >= finished  # pyright: ignore[reportOperatorIssue]
    code, _, err = run(run_dir, settings)
    assert code == 0, err
    assert_same_run(straight_run, run_dir)


def test_a_full_disk_during_a_save_leaves_the_last_good_checkpoint(straight_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "full"
    process = start(run_dir)
    assert wait_for(process, lambda: (run_dir / "checkpoints" / "step-000002").exists())
    kill(process)

    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    code, _, err = run(run_dir, preexec_fn=small_files_only)
    assert code == 1
    assert "step 4" in err
    assert "checkpoint" in err
    latest = Checkpoints(run_dir / "checkpoints").latest()
    assert latest is not None
    assert latest[0] == 2
    code, _, err = run(run_dir)
    assert code == 0, err
    assert_same_run(straight_run, run_dir)
