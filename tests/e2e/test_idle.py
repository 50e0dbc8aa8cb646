"""A run that learns nothing says so in its lines, counts it, and does not end as a success."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.driver.idle import IdleError
from lockstep.loop import train
from lockstep.metrics.sinks import read_jsonl
from lockstep.recipes import load_recipe
from tests.e2e.conftest import SMALL, assert_same_run, final_state, run

pytestmark = pytest.mark.slow

REWARDS = """
from lockstep.records import Score

def never(problem, completion, stopped):
    return None

def constant(problem, completion, stopped):
    return Score(0.25, correct=None)

def sometimes(problem, completion, stopped):
    return None if problem.row["a"] < 6 else float(len(completion))
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module ``idle_rewards``, on the import path."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "idle_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(folder)
    return folder


def with_reward(name: str, *settings: str) -> list[str]:
    return [*SMALL, f'task.rewards=[{{ name = "idle_rewards:{name}" }}]', *settings]


def test_rewards_that_all_abstain_stop_the_run_with_the_reason(tmp_path: Path, rewards: Path) -> None:
    code, out, err = run(tmp_path / "run", with_reward("never"), python_path=rewards)
    assert code == 1
    assert "held-out after" not in out
    assert "every reward abstained on all 16 samples, the 3rd step in a row" in err
    assert "Traceback" not in err
    assert "nothing learned" in err
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row.get("optimizer_steps/skipped") for row in rows] == [None, 1, 1, 1]
    again = run(tmp_path / "run", with_reward("never"), python_path=rewards)
    assert again[0] == 1, "a resume that still learns nothing is none either"
    assert "the 4th step in a row" in again[2]


@pytest.mark.usefixtures("rewards")
def test_single_steps_without_a_reward_are_skipped_and_counted(tmp_path: Path) -> None:
    settings = with_reward("sometimes", "algorithm.num_prompts=1", "algorithm.abstain_patience=6")
    assert train(load_recipe("tiny-qwen3-moe", settings), tmp_path / "run") == 0
    steps = read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    skipped = [row for row in steps if row["optimizer_steps/skipped"]]
    assert 0 < len(skipped) < len(steps)
    assert all("abstained" in str(row["idle/why"]) or "equal" in str(row["idle/why"]) for row in skipped)
    assert any("abstained" in str(row["idle/why"]) for row in skipped)
    assert all("grad_norm" not in row for row in skipped)
    assert all(row["grad_norm"] > 0 and "idle/why" not in row for row in steps if row not in skipped)  # pyright: ignore


@pytest.mark.usefixtures("rewards")
def test_equal_rewards_move_no_weight_and_the_end_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = with_reward("constant", "trainer.weight_decay=0.1")
    assert train(load_recipe("tiny-qwen3-moe", [*settings, "steps=3"]), tmp_path / "run") == 0
    told = capsys.readouterr()
    assert "none of the 3 steps changed a weight" in told.err
    assert "the rewards of each group's samples are equal, 0.25 in the mean" in told.err
    assert "held-out after:  reward 0.250" in told.out, "a reward without a notion of correct is shown itself"
    assert not any(tensor.any() for name, tensor in final_state(tmp_path / "run").items() if name.startswith("exp_avg"))
    with pytest.raises(IdleError, match="no weight has changed for 2 steps"):
        train(load_recipe("tiny-qwen3-moe", [*settings, "algorithm.idle_patience=2"]), tmp_path / "impatient")
    assert len(read_jsonl(tmp_path / "impatient" / "metrics.jsonl")) == 3


@pytest.mark.usefixtures("rewards")
def test_a_run_that_was_stopped_for_idleness_goes_on_with_more_patience_as_if_nothing_had_been(tmp_path: Path) -> None:
    settings = with_reward("constant")
    assert train(load_recipe("tiny-qwen3-moe", settings), tmp_path / "straight") == 0
    with pytest.raises(IdleError):
        train(load_recipe("tiny-qwen3-moe", [*settings, "algorithm.idle_patience=2"]), tmp_path / "resumed")
    assert train(load_recipe("tiny-qwen3-moe", settings), tmp_path / "resumed") == 0
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
