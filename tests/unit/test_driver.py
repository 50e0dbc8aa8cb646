"""Small parts of the driver: stop requests, progress, metric rows, splitting a batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.driver.assembly import say_too_few_heldout
from lockstep.driver.console import Console, heldout_text
from lockstep.driver.interrupt import StopRequest, stop_on_signals
from lockstep.driver.parity_commands import print_attribution, print_table
from lockstep.driver.progress import Progress
from lockstep.driver.rows import (
    duplicate_share,
    over_optimizer_steps,
    refit_metrics,
    rollout_metrics,
    step_line,
    time_metrics,
    unscored_counts,
)
from lockstep.driver.scoring import self_agreement, split_for_optimizer
from lockstep.interfaces import LogProbs
from lockstep.parity.attribute import Factor, Scores, attribute
from lockstep.recipes import load_recipe
from lockstep.records import Claim, Problem, Rollout, Score, Sequence, TrainSequence
from lockstep.refit.transaction import Receipt
from lockstep.tasks.build import build_task


def make_rollout(rollout_id: str, tokens: list[int], score: Score, group_id: str = "g") -> Rollout:
    ids = np.array([1, *tokens], np.int32)
    mask = np.arange(len(ids)) > 0
    zeros = np.zeros(len(ids), np.int32)
    sequence = Sequence(rollout_id, ids, mask, np.zeros(len(ids), np.float32), zeros, zeros)
    return Rollout(rollout_id, group_id, Problem("p", "q", None), (sequence,), "", score, "finished")


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    """Python's own handler, also where the tests run in the background of a shell, which ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupt")
def test_first_signal_asks_second_raises_and_hold_defers_it_once() -> None:
    said: list[str] = []
    with stop_on_signals(said.append) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        stop.hold()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert len(said) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with stop_on_signals(said.append) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.hold()
        stop.release()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_nothing_is_requested_at_first() -> None:
    assert not StopRequest(print).requested


def test_progress_survives_a_round_trip_and_refuses_another_format(tmp_path: Path) -> None:
    progress = Progress()
    progress.advance(step=4, version=8, cursor=32, gate={"num_unjudged_in_row": 1})
    progress.save(tmp_path)
    assert Progress.load(tmp_path) == progress
    (tmp_path / "progress.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format"):
        Progress.load(tmp_path)


def test_means_are_over_rollouts_that_have_the_value_and_absent_otherwise() -> None:
    rollouts = [
        make_rollout("a", [3], Score(1.0, correct=True, parts={"exact": 1.0, "user:fn": None})),
        make_rollout("b", [3, 4], Score(0.0, correct=False, parts={"exact": 0.0})),
        make_rollout("c", [5], Score(None, error="grader died")),
    ]
    row = rollout_metrics(rollouts, "{}/mean")
    assert row["reward/mean"] == 0.5
    assert row["accuracy/mean"] == 0.5
    assert row["part_exact/mean"] == 0.5
    assert row["length_tokens/mean"] == pytest.approx(4 / 3)
    assert "format/mean" not in row
    assert "part_user_fn/mean" not in row
    scores = [rollout.score for rollout in rollouts]
    assert unscored_counts(scores) == {
        "rollout/unscored": 1,
        "rollout/failed": 1,
        "rollout/first_error": "grader died",
    }
    assert unscored_counts(scores[:2], "eval") == {"eval/unscored": 0, "eval/failed": 0}
    assert duplicate_share([]) == {}
    assert duplicate_share([*rollouts, make_rollout("d", [3], Score(1.0))])["rollout/duplicate_share"] == 0.25


def test_counts_add_up_over_optimizer_steps_and_the_rest_is_averaged() -> None:
    merged = over_optimizer_steps(
        [
            {"loss": 1.0, "corrections/rejected_tokens": 2.0, "corrections/ratio_mean": 1.0},
            {"loss": 3.0, "corrections/rejected_tokens": 5.0, "corrections/ratio_mean": 2.0, "kl": 0.5},
        ]
    )
    assert merged == {"loss": 2.0, "corrections/rejected_tokens": 7.0, "corrections/ratio_mean": 1.5, "kl": 0.5}


def test_phases_that_did_not_run_are_absent() -> None:
    row = time_metrics({"step": 2.0, "train": 1.0}, generated_tokens=10, trained_tokens=30)
    assert row == {"time/step_s": 2.0, "time/train_s": 1.0, "throughput/trained_tokens_per_s": 30.0}


def test_the_step_line_shows_the_verdict_even_when_nothing_was_measured() -> None:
    line = step_line(
        {"step": 1, "verdict/status": "unjudged", "agreement/metric": "abs_diff/mean", "agreement/bound": 0.1}, 5
    )
    assert "agreement not measured" in line
    assert "unjudged" in line


@pytest.mark.parametrize(
    ("statuses", "shown"),
    [
        (("held", "not checked", "held", "not checked", "held"), "refit 0.78 s, 3 claims held"),
        (("not checked", "held", "not checked", "not checked", "not checked"), "refit 0.78 s, 1 claim held"),
        (("not checked",) * 5, "refit 0.78 s"),
    ],
)
def test_the_step_line_shows_how_many_claims_of_the_refit_held(statuses: tuple[Any, ...], shown: str) -> None:
    names = ("covered", "transported", "loaded", "derived", "behaves")
    claims = tuple(Claim(name, status, "why") for name, status in zip(names, statuses, strict=True))
    receipt = Receipt(1, "local", 2, 0, 10, 0.1, 0.1, 0.1, 0.1, claims)
    row: dict[str, Any] = {"step": 1, "verdict/status": "pass", "agreement/metric": "x", "agreement/bound": 0.1}
    pieces = step_line(row | {"time/refit_s": 0.78} | refit_metrics(receipt), 5).split(" · ")
    assert pieces[-1] == shown


def test_the_trainer_is_held_against_itself_where_a_rollout_has_no_sequence() -> None:
    class AloneDiffers:
        """Its log-probs depend on whether a sequence is alone."""

        def logprobs(self, sequences: list[Sequence]) -> dict[str, LogProbs]:
            value = -1.0 if len(sequences) > 1 else -1.5
            return {s.sequence_id: LogProbs(np.full(len(s.tokens), value, np.float32), 0) for s in sequences}

    empty = replace(make_rollout("empty", [3], Score(None, error="failed")), sequences=())
    whole = [make_rollout(name, [3, 4], Score(1.0)) for name in "ab"]
    parts: Any = SimpleNamespace(trainer=AloneDiffers())
    found = self_agreement(parts, [empty, *whole])
    assert found == self_agreement(parts, whole)
    assert 0.5 in found.values()
    assert self_agreement(parts, [empty]) == {}


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_a_rollout_is_never_split_over_optimizer_steps(num_steps: int) -> None:
    items = []
    for index in range(7):
        rollout = make_rollout(f"r{index // 2}", [index + 2], Score(1.0))
        sequence = rollout.sequences[0]
        items.append(TrainSequence(sequence, rollout.rollout_id, sequence.loss_mask, sequence.logprobs))
    parts = split_for_optimizer(items, num_steps)
    assert [item for part in parts for item in part] == items
    owners = [{item.rollout_id for item in part} for part in parts]
    assert sum(len(owner) for owner in owners) == 4
    assert len(parts) == min(num_steps, 4)
    assert split_for_optimizer([], num_steps) == []


def test_text_from_outside_is_printed_letter_by_letter(capsys: pytest.CaptureFixture[str]) -> None:
    told = "  3 samples have no score, first: my:boom: ValueError: [red] :smile: [/red]"
    Console().say(told)
    print_table("a:boom:b", ["factor"], [["env[bold]:fire:"]])
    captured = capsys.readouterr()
    assert captured.err == told + "\n"
    assert "a:boom:b" in captured.out
    assert "env[bold]:fire:" in captured.out


@pytest.mark.parametrize(("asked", "told"), [(2, []), (5, ["eval.num_problems: 2 instead of 5"])])
def test_fewer_held_out_problems_in_a_file_than_are_asked_for_are_said(
    tmp_path: Path, asked: int, told: list[str]
) -> None:
    for name, count in (("train", 4), ("heldout", 2)):
        rows = [f'{{"prompt": "{name} {i}", "answer": "{i}"}}\n' for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    files = {"path": str(tmp_path / "train.jsonl"), "heldout_path": str(tmp_path / "heldout.jsonl")}
    settings = [f"task.{key}={path}" for key, path in files.items()]
    config = load_recipe("quickstart", ["task.kind=file", *settings, f"eval.num_problems={asked}"]).config
    said: list[str] = []
    task = build_task(config.task)
    say_too_few_heldout(config, task, said.append)
    task.close()
    assert [text.partition(" (")[0] for text in said] == told


def test_a_held_out_result_without_a_score_says_why() -> None:
    row = {"eval/problems": 4, "eval/unscored": 4}
    assert heldout_text(row) == "4 of 4 without a score: every reward abstained"
    assert heldout_text(row | {"eval/first_error": "my:own: it broke"}) == "4 of 4 without a score: my:own: it broke"


def test_a_steps_line_is_styled_and_its_sentence_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "verdict/status": "warn", "agreement/metric": "k3", "agreement/bound": 0.1, "agreement/k3": 0.2}
    Console().step(row | {"verdict/sentence": "worst: '[bold]' after ':fire:'"}, 5)
    assert capsys.readouterr().err == "step 1/5 · k3 0.2 · warn (bound 0.1)\n  worst: '[bold]' after ':fire:'\n"


def test_an_effect_and_its_interval_are_changes_of_the_metric_with_one_sign(capsys: pytest.CaptureFixture[str]) -> None:
    def evaluate(names: frozenset[str]) -> Scores:
        size = 0.5 - 0.4 * ("good" in names) + 0.4 * ("bad" in names)
        return Scores(tuple(np.full(5, size + 0.01 * index) for index in range(8)))

    factors = [Factor(name, name, None) for name in ("good", "bad", "idle")]
    print_attribution(attribute(evaluate, factors, bound=0.2, budget=20))
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name, sign in (("good", "-"), ("bad", "+")):
        effect, low, high = (float(lines[name][place]) for place in (2, 3, 5))
        assert lines[name][2].startswith(sign)
        assert low <= effect <= high
    assert lines["idle"][2:6] == ["+0", "+0", "to", "+0"]
