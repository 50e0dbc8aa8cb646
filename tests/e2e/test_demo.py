"""The demo's story is true: the receipt refuses, the gate stops, and the search names the layer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lockstep.demo import NUM_GOOD_REFITS, STALE_STEP, Story, layer_dropped, share_of_digits, stale_refit
from lockstep.loop import EXIT_GATE, train
from lockstep.metrics.run_folder import RunFolderError
from lockstep.metrics.sinks import read_jsonl
from lockstep.recipes import load_recipe
from lockstep.records import Problem
from lockstep.rollout.receiver import TorchReceiver
from tests.e2e.conftest import SMALL, command, stable_rows

TINY = Story("tiny-qwen3-moe", (*SMALL, "trainer.learning_rate=0.01"), "model.layers.1")


def test_the_story_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stale_refit(tmp_path / "demo", TINY) == 0
    out = capsys.readouterr().out
    assert "The receipt refuses it" in out
    assert "The gate stops it at step" in out
    assert "of it load:model.layers.1 is enough" in out
    assert "Caught by the receipt: yes. Stopped by the gate: yes. Layer named: yes." in out
    *before, refused, last = read_jsonl(tmp_path / "demo" / "refits.jsonl")
    assert refused["step"] == last["step"] == STALE_STEP
    assert "model.layers.1." in str(refused["error"])
    assert {claim["status"] for claim in last["claims"]} == {"not checked"}  # pyright: ignore
    assert not any("error" in receipt for receipt in before)
    assert read_jsonl(tmp_path / "demo" / "metrics.jsonl")[-1]["step"] == STALE_STEP + 1


def test_after_the_refusal_it_is_the_run_that_never_verified(tmp_path: Path) -> None:
    """One run tells both halves of the story; the second is to be what a run of its own would be."""
    stale_refit(tmp_path / "demo", TINY)
    with layer_dropped(TINY.layer, after=NUM_GOOD_REFITS):
        code = train(load_recipe(TINY.recipe, [*TINY.settings, "refit.verify_every=1000"]), tmp_path / "plain")
    assert code == EXIT_GATE
    assert stable_rows(tmp_path / "demo") == stable_rows(tmp_path / "plain")


def test_without_the_fault_the_demo_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It must not be able to claim what it did not see."""
    monkeypatch.setattr("lockstep.demo.layer_dropped", lambda _layer, after: layer_dropped("no.such.layer", after))
    assert stale_refit(tmp_path / "demo", TINY) == 1
    out = capsys.readouterr().out
    assert "NOT caught by the receipt" in out
    assert "did NOT stop it" in out


def test_the_fault_ends_with_its_block(tmp_path: Path) -> None:
    original = TorchReceiver.receive
    with layer_dropped("model.layers.0", after=0):
        assert TorchReceiver.receive is not original
    assert TorchReceiver.receive is original
    (tmp_path / "something").touch()
    with pytest.raises(RunFolderError, match="choose a new folder"):
        stale_refit(tmp_path, TINY)


def test_the_demos_reward_tells_completions_apart() -> None:
    problem = Problem("p", "What is 2 + 5?", "7")
    rewards = [share_of_digits(problem, text, True).reward for text in ("7", "It is 7.", "", "seven")]
    assert rewards == [1.0, 1 / 8, 0.0, 0.0]


@pytest.mark.slow
def test_the_command_on_the_quickstarts_model(tmp_path: Path) -> None:
    done = subprocess.run(
        command("demo", "stale-refit", "--run-dir", str(tmp_path / "demo")),
        capture_output=True,
        text=True,
        timeout=580,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Caught by the receipt: yes. Stopped by the gate: yes. Layer named: yes." in done.stdout
    assert "model.layers.11" in done.stdout
