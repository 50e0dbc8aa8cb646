"""Times by phase say what they name: the extra passes of a step count once, and so never more than the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lockstep.config.schema import AlgorithmConfig, TrainerConfig
from lockstep.driver.rows import PHASES, time_metrics
from lockstep.driver.scoring import score_models
from lockstep.spans import Recorder, recording, span
from lockstep.train.fsdp import FsdpTrainer
from tests.contract.tiny_models import tiny_model
from tests.synthetic_run import make_rollout


def test_an_extra_pass_counts_once_and_takes_no_longer_than_its_step() -> None:
    config = TrainerConfig(dtype="float32")
    trainer = FsdpTrainer(tiny_model("qwen3", torch.float32), config, total_optimizer_steps=1, temperature=1.0)
    parts: Any = SimpleNamespace(
        trainer=trainer,
        algorithm=AlgorithmConfig(optimizer_steps_per_batch=2),
        config=SimpleNamespace(rollout=SimpleNamespace(record_routes=False)),
        reference=None,
        teacher=None,
    )
    rollouts = [make_rollout(f"r{k}", "g", ["a", "b", "c"]) for k in range(4)]
    with recording(Recorder()) as recorder, span("step"):
        assert score_models(parts, rollouts).live is not None
    with recording(recorder):
        trainer.logprobs([sequence for rollout in rollouts for sequence in rollout.sequences])  # as a refit's probes do
    names = [event["name"] for event in recorder.events]
    assert names.count(PHASES["time/logprobs_s"]) == 1
    row = time_metrics(recorder.take_totals(), generated_tokens=1, trained_tokens=1)
    assert 0 < float(row["time/logprobs_s"]) <= float(row["time/step_s"])
