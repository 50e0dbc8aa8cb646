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
from lockstep.metrics.run_folder import read_rollouts
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
    saving = wait_for(
        third, lambda: any("partial" in entry.name for entry in set(partial[0].parent.iterdir()) - before)
    )
    assert saving, "the run ended before a save was seen"
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


def test_a_run_that_fails_saves_its_last_finished_step(tmp_path: Path) -> None:
    reward = tmp_path / "fragile.py"
    reward.write_text(
        "calls = []\n"
        "def fragile(problem, completion, stopped):\n"
        "    calls.append(completion)\n"
        "    if len(calls) > 140:\n"
        "        raise ValueError('the grader lost its data')\n"
        "    return 1.0 if completion.strip() == problem.answer else 0.0\n"
    )
    run_dir = tmp_path / "fails"
    settings = [*SMALL, "checkpoint.every=100", 'task.rewards=[{name="fragile:fragile"}]']
    code, _, err = run(run_dir, settings, cwd=tmp_path, python_path=tmp_path)
    assert code == 1
    assert "the grader lost its data" in err
    assert "max_failed_share" in err
    finished = read_jsonl(run_dir / "metrics.jsonl")[-1]["step"]
    latest = Checkpoints(run_dir / "checkpoints").latest()
    assert finished != 0
    assert latest is not None
    assert latest[0] == finished
    reward.write_text(reward.read_text() + "# mended\n")
    code, _, err = run(run_dir, settings, cwd=tmp_path, python_path=tmp_path)
    assert code == 2, "another grader is another run"
    assert "task.rewards[0]" in err


def test_resumed_at_the_border_of_an_epoch_the_run_does_its_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight problems to train on, four a step: the save after step 2 lies exactly where the data begins again."""
    from lockstep import loop
    from lockstep.recipes import load_recipe

    settings = [*SMALL, "task.max_operand=3", "task.num_heldout=8"]
    recipe, train_on = load_recipe("tiny-qwen3-moe", settings), loop.train_on

    def interrupted_at_step_3(parts, sampled, step, stop):
        if step == 3:
            raise KeyboardInterrupt
        return train_on(parts, sampled, step, stop)

    assert loop.train(recipe, tmp_path / "straight") == 0
    monkeypatch.setattr(loop, "train_on", interrupted_at_step_3)
    assert loop.train(recipe, tmp_path / "resumed") == 130
    monkeypatch.setattr(loop, "train_on", train_on)
    assert loop.train(recipe, tmp_path / "resumed") == 0
    assert [row["step"] for row in stable_rows(tmp_path / "resumed")] == [0, 1, 2, 3, 4, 5, 6]
    problems = [{r.problem_id for r in read_rollouts(tmp_path / "resumed", step)} for step in (1, 2, 3, 4)]
    assert problems[0].isdisjoint(problems[1])
    assert len(problems[0] | problems[1]) == 8
    assert problems[2] | problems[3] == problems[0] | problems[1]
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")


def test_a_typo_in_the_first_try_does_not_burn_the_run_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "typo"
    code, _, err = run(run_dir, [*SMALL, 'task={kind="file", path="no-such-file.jsonl"}'])
    assert code == 2
    assert "no-such-file.jsonl" in err
    code, _, err = run(run_dir, [*SMALL, "steps=1"])
    assert code == 0, err


def test_kl_to_the_initial_policy_starts_at_zero_after_a_warm_up_and_after_a_resume(tmp_path: Path) -> None:
    settings = [*SMALL, 'algorithm.kl={place="loss", estimator="k3", coefficient=0.1}', "trainer.learning_rate=0.001"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    code, _, err = run(straight, settings)
    assert code == 0, err
    rows = read_jsonl(straight / "metrics.jsonl")
    assert abs(float(rows[1]["kl"])) < 1e-6  # pyright: ignore[reportArgumentType]
    assert float(rows[-1]["kl"]) > 1e-6  # pyright: ignore[reportArgumentType]
    process = start(resumed, settings)
    assert wait_for(process, lambda: (resumed / "checkpoints" / "step-000002").exists())
    kill(process)
    code, _, err = run(resumed, settings)
    assert code == 0, err
    assert_same_run(straight, resumed)
