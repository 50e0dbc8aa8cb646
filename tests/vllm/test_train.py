"""The command with vLLM as the engine does what a user sees: it learns, agrees at every step, and resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.metrics.sinks import read_jsonl

pytestmark = pytest.mark.lane(
    "stage-a-vllm", hardware={"cpu": "cpu"}, minutes=3, owner="training", labels=["training", "vllm"]
)

BOUND = 1e-5


def train(run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    """Run ``lockstep train`` on the tiny MoE with vLLM, and return the metrics."""
    overrides = [argument for setting in settings for argument in ("--set", setting)]
    command = [sys.executable, "-m", "lockstep", "train", "tiny-qwen3-moe", "--run-dir", str(run_dir)]
    finished = subprocess.run(
        [*command, "--set", "rollout.engine=vllm", "--set", "rollout.vllm.kv_cache_bytes=67108864", *overrides],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    words = {line.split(":")[0].rstrip() for line in finished.stdout.splitlines()}
    assert words == {"held-out before", "held-out after", "report"}, "results go to stdout, vLLM's log does not"
    return [dict(row) for row in read_jsonl(run_dir / "metrics.jsonl")]


def test_a_tiny_moe_learns_with_vllm_and_every_step_agrees(tmp_path: Path) -> None:
    rows = train(tmp_path / "run", "steps=30", "eval.num_problems=20", "checkpoint.every=30", "threads=1")
    steps = [row for row in rows if row["step"] > 0]
    assert len(steps) == 30
    assert {row["verdict/status"] for row in steps} == {"pass"}
    assert all(0 < row["agreement/abs_diff/mean"] <= BOUND for row in steps)
    assert all(row["agreement/stale"] == 0 and row["agreement/tokens"] > 0 for row in steps)
    assert any(row.get("grad_norm", 0) > 0 for row in steps), "a gradient must have moved the weights"
    receipts = read_jsonl(tmp_path / "run" / "refits.jsonl")
    claims = [claim for receipt in receipts[:2] for claim in receipt["claims"]]  # pyright: ignore
    assert {claim["status"] for claim in claims if claim["name"] != "transported"} == {"held"}
    first = sum(row["reward/mean"] for row in steps[:10])
    assert sum(row["reward/mean"] for row in steps[-10:]) > first, "it learns"


def test_a_run_with_vllm_resumes(tmp_path: Path) -> None:
    small = ("supervised.steps=8", "algorithm.num_prompts=4", "eval.num_problems=4", "checkpoint.every=1", "threads=1")
    small += ('trainer.schedule="constant"',)  # another one depends on the number of steps, which changes here
    train(tmp_path / "run", "steps=2", *small)
    rows = train(tmp_path / "run", "steps=4", *small)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["agreement/abs_diff/mean"] <= BOUND for row in rows if row["step"] > 0)


def test_a_recorded_batch_is_scored_again_by_vllm_on_either_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with the embedded engine, re-scored by another engine without the loop."""
    from lockstep.driver.parity_commands import replay
    from lockstep.loop import train as train_here
    from lockstep.recipes import load_recipe
    from lockstep.rollout.vllm_scoring import VllmScorer

    small = ["steps=2", "supervised.steps=8", "algorithm.num_prompts=4", "eval.num_problems=4", "threads=1"]
    assert train_here(load_recipe("tiny-qwen3-moe", small), tmp_path / "run") == 0
    capsys.readouterr()
    asked, original = [], VllmScorer.score

    def score(self, sequences, path):
        asked.append(path)
        return original(self, sequences, path)

    monkeypatch.setattr(VllmScorer, "score", score)
    for path in ("prefill", "decode"):
        options: dict[str, Any] = {"dtype": None, "device": None, "path": path, "as_json": True}
        assert replay(tmp_path / "run", 1, engine="vllm", **options) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert asked[-1] == path
        assert 0 < found["pairs"]["recorded trainer/replayed"]["abs_diff/mean"] <= BOUND
        assert "loaded held" in found["replayed"]
