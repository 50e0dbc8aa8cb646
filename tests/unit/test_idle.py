"""Steps that teach nothing: the reason that is given, the counts, and when they stop a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.config.schema import AlgorithmConfig
from lockstep.driver.idle import Idle, IdleCount, IdleError, idleness
from lockstep.driver.progress import Progress
from lockstep.driver.rows import optimizer_metrics, over_optimizer_steps, step_line
from lockstep.records import OptimOutput

PLAIN = AlgorithmConfig()
SAMPLES = {"num_rollouts": 8.0, "num_loss_tokens": 20.0, "optimizer_steps/moved": 0.0}


@pytest.mark.parametrize(
    ("metrics", "algorithm", "words"),
    [
        ({"num_rollouts": 0.0, "rollout/dropped_groups": 4}, PLAIN, r"dropped all 4 groups \(0 of them without"),
        (
            {"num_rollouts": 0.0, "rollout/dropped_groups": 4, "rollout/dropped_unscored_groups": 4},
            PLAIN,
            "dropped all 4 groups, because no sample of them has a reward",
        ),
        ({**SAMPLES, "num_abstained": 8.0, "num_excluded": 8.0}, PLAIN, "every reward abstained on all 8 samples"),
        (
            {**SAMPLES, "num_abstained": 6.0, "num_aborted": 2.0, "num_excluded": 8.0},
            PLAIN,
            r"none of the 8 samples can be used \(6 without a reward, 2 aborted or failed\)",
        ),
        ({**SAMPLES, "num_loss_tokens": 0.0}, AlgorithmConfig(truncated="mask"), 'algorithm.truncated = "mask"'),
        ({**SAMPLES, "corrections/rejected_tokens": 20.0}, PLAIN, "rejected every token"),
        (SAMPLES, AlgorithmConfig(advantage="distill"), "teacher"),
        ({**SAMPLES, "reward/mean": 0.25}, PLAIN, "rewards of each group's samples are equal, 0.25 in the mean"),
    ],
)
def test_the_reason_is_the_one_that_left_nothing(
    metrics: dict[str, float], algorithm: AlgorithmConfig, words: str
) -> None:
    idle = idleness(metrics, algorithm)
    assert idle is not None
    assert re.search(words, idle.why)
    assert idle.abstained == ("abstained on all" in words or "no sample" in words)
    assert idleness({**metrics, "optimizer_steps/moved": 1.0}, algorithm) is None


def test_a_step_without_a_gradient_counts_as_skipped_and_has_no_norm() -> None:
    moved, skipped = OptimOutput(1, 0.5, 0.1), OptimOutput(2, None, 0.1)
    row = over_optimizer_steps([optimizer_metrics(moved), optimizer_metrics(skipped)])
    assert row == {"grad_norm": 0.5, "learning_rate": 0.1, "optimizer_steps/moved": 1, "optimizer_steps/skipped": 1}
    assert "grad_norm" not in over_optimizer_steps([optimizer_metrics(skipped)])
    base = {"step": 1, "verdict/status": "pass", "agreement/metric": "k3", "agreement/bound": 0.1}
    assert "nothing learned" in step_line({**base, "idle/why": "x"}, 5)
    assert "nothing learned" not in step_line(base, 5)


def test_abstention_stops_sooner_than_equal_rewards_and_a_step_that_learns_starts_anew() -> None:
    settings = AlgorithmConfig(abstain_patience=2, idle_patience=4)
    count, abstained, equal = IdleCount(), Idle("all abstained", abstained=True), Idle("all equal")

    def after(idle: Idle | None, step: int) -> None:
        count.add(idle)
        count.refuse(idle, step, 100, settings)

    for step, idle in enumerate([abstained, None, abstained, equal, abstained, None, equal, equal, equal], start=1):
        after(idle, step)
    with pytest.raises(IdleError, match=r"step 10: all equal; no weight has changed for 4 steps.*idle_patience"):
        after(equal, 10)
    after(None, 11)
    after(abstained, 12)
    with pytest.raises(IdleError, match=r"step 13: all abstained, the 2nd step in a row.*abstain_patience"):
        after(abstained, 13)
    assert (count.total, count.in_row, count.abstained_in_row) == (10, 2, 2)


def test_a_run_of_nothing_but_abstentions_is_no_success_however_short() -> None:
    count = IdleCount(total=1, in_row=1, abstained_in_row=1)
    with pytest.raises(IdleError, match="the 1st step in a row"):
        count.refuse(Idle("all abstained", abstained=True), 1, 1, PLAIN)
    count.refuse(Idle("all abstained", abstained=True), 1, 2, PLAIN)  # the run goes on
    count.refuse(None, 1, 1, PLAIN)


def test_the_end_of_a_run_says_that_no_step_changed_a_weight() -> None:
    assert "none of the 6 steps changed a weight" in str(IdleCount(total=6).closing(6))
    assert IdleCount(total=5).closing(6) is None


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    progress = Progress()
    progress.advance(1, 1, 8, {}, Idle("all abstained", abstained=True))
    progress.save(tmp_path)
    assert Progress.load(tmp_path).idle == IdleCount(total=1, in_row=1, abstained_in_row=1)
    (tmp_path / "progress.json").write_text('{"format": 1, "step": 3}')
    assert Progress.load(tmp_path).idle == IdleCount(), "a checkpoint from before the counts"
