"""Whole runs of the tiny recipes on one GPU, any vendor: every step agrees, every claim of the refits holds.

pytest --lane stage-b-1-gpu --hardware h200
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.lanes import Case
from lockstep.lanes.recorder import Recorder
from lockstep.lanes_layout import settings


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(
    case: Case, folder: Path, evidence: Recorder, bound: float, *arguments: str, device: str = "cuda"
) -> list[dict[str, Any]]:
    """Train the case's recipe in a process of its own; record agreement, reward's finiteness and the refits' claims."""
    command = [sys.executable, "-m", "lockstep", "train", str(case.recipe), "--run-dir", str(folder)]
    for setting in (f"device={device}", "refit.verify_every=1", *settings(case), *arguments):
        command += ["--set", setting]
    done = subprocess.run([*command, *case.extra_args], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"device: {device}" in done.stdout + done.stderr, "the run must have been on the GPU"
    steps = [row for row in rows_of(folder / "metrics.jsonl") if row["step"] > 0]
    evidence.series("agreement", [row["agreement/abs_diff/mean"] for row in steps], bound, quantile=1.0)
    evidence.gate("compared tokens", min(row["agreement/tokens"] for row in steps), 1, "at_least")
    claims = [claim for receipt in rows_of(folder / "refits.jsonl") for claim in receipt["claims"]]
    for claim in claims:
        if claim["name"] in ("covered", "loaded") or (claim["name"], claim["status"]) == ("behaves", "failed"):
            evidence.claim(f"refit {claim['name']}", claim["status"])
    behaved = [claim for claim in claims if (claim["name"], claim["status"]) == ("behaves", "held")]
    evidence.gate("refits that behave", len(behaved), 1, "at_least")
    return steps


@pytest.mark.lane(
    "stage-b-1-gpu",
    hardware={"cuda": ["h100", "h200"], "rocm": ["mi300x", "mi350"]},
    minutes=0.8,
    labels=["training"],
    owner="training",
    recipe="tiny-qwen3-moe",
    gates=["agreement", "compared tokens", "refits that behave"],
    run={"num_steps": 12, "step_s": 3, "checked_at_step": 12},
)
def test_a_tiny_moe_agrees_at_every_step(lane_case: Case, lane_evidence: Recorder, tmp_path: Path) -> None:
    steps = run(lane_case, tmp_path / "run", lane_evidence, 1e-5, "steps=12", "eval.num_problems=20")
    assert [row["step"] for row in steps] == list(range(1, 13))


@pytest.mark.lane(
    "stage-b-1-gpu",
    hardware={"cuda": ["h100", "h200"], "rocm": ["mi300x", "mi350"]},
    minutes=2,
    labels=["training"],
    owner="training",
    recipe="tiny-deepseek-v4",
    gates=["agreement", "compared tokens", "refits that behave"],
)
def test_tiny_deepseek_v4_agrees_at_every_step(lane_case: Case, lane_evidence: Recorder, tmp_path: Path) -> None:
    steps = run(lane_case, tmp_path / "run", lane_evidence, 1e-5, "steps=4", "eval.num_problems=5")
    assert [row["step"] for row in steps] == list(range(1, 5))


@pytest.mark.lane(
    "stage-b-1-gpu",
    hardware={"cuda": ["h100", "h200"], "rocm": ["mi300x", "mi350"]},
    minutes=0.3,
    labels=["training"],
    owner="training",
)
def test_what_torch_shards_on_this_gpu_are_leaves() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.train.leaf_check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "sharded parameters on cuda" in done.stdout
    assert "are leaves" in done.stdout
