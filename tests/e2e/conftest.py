"""Running the command as a user does, and comparing what two runs left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lockstep.metrics.checkpoints import Checkpoints
from lockstep.metrics.sinks import read_jsonl

SMALL = (
    "steps=6",
    "supervised.steps=8",
    "supervised.batch_size=16",
    "algorithm.num_prompts=4",
    "algorithm.group_size=4",
    "eval.num_problems=4",
    "checkpoint.every=2",
    "threads=1",
)
"""A run of tiny-qwen3-moe of a few seconds."""

UNSTABLE = ("time", "throughput/", "memory/", "refit/transfer_s", "refit/commit_s", "refit/verify_s", "refit/claims_")
"""Metrics that measure the machine, or how often this process verified (after a recovery it does), not the run."""


def command(*arguments: str) -> list[str]:
    """The ``lockstep`` command line of this environment."""
    return [sys.executable, "-m", "lockstep", *arguments]


def start(
    run_dir: Path,
    settings: Sequence[str] = SMALL,
    recipe: str = "tiny-qwen3-moe",
    python_path: Path | None = None,
    **options: object,
) -> subprocess.Popen[str]:
    """Start ``lockstep train``; output is captured."""
    overrides = [argument for setting in settings for argument in ("--set", setting)]
    return subprocess.Popen(
        command("train", recipe, "--run-dir", str(run_dir), *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(python_path or "")},
        **options,  # pyright: ignore[reportArgumentType]
    )


def run(run_dir: Path, settings: Sequence[str] = SMALL, **options: object) -> tuple[int, str, str]:
    """Run to the end: exit code, stdout, stderr."""
    process = start(run_dir, settings, **options)  # pyright: ignore[reportArgumentType]
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def stable_rows(run_dir: Path) -> list[dict[str, object]]:
    """The metrics without those that measure the machine."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(UNSTABLE)} for row in rows]


def final_state(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint: masters, moments, buffers, counters."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    latest = Checkpoints(run_dir / "checkpoints").latest()
    assert latest is not None
    target = run_dir / "state.pt"
    dcp_to_torch_save(latest[1] / "trainer", target)
    return torch.load(target, weights_only=True)


def assert_same_run(one: Path, other: Path) -> None:
    """Losses, tokens, agreement and final weights are bit-equal."""
    rows, others = stable_rows(one), stable_rows(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, same in zip(rows, others, strict=True):
        assert row == same
    state, same_state = final_state(one), final_state(other)
    assert state.keys() == same_state.keys()
    assert state
    for name, tensor in state.items():
        assert torch.equal(tensor, same_state[name]), name


@pytest.fixture(scope="session")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    code, out, err = run(run_dir)
    assert code == 0, err
    assert "report:" in out
    return run_dir
