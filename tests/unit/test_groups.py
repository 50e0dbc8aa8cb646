"""Sampling of groups: prompt order, refills, seeds, and what happens to samples that did not finish."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest

from lockstep.config.errors import ConfigError
from lockstep.config.keys import walk
from lockstep.config.schema import AlgorithmConfig, DynamicSamplingConfig, PromptConfig, RolloutConfig
from lockstep.config.toml_text import dotted
from lockstep.driver.groups import GroupError, GroupSampler, sequence_of, stream_seed
from lockstep.driver.rows import unscored_counts
from lockstep.model.characters import CharacterTokenizer
from lockstep.recipes import load_recipe
from lockstep.records import Completion, FinishReason, GenerateRequest, Problem, Score
from lockstep.rollout.queued_engine import _sampling_problem
from lockstep.tasks.prompt import PromptRenderer

TOKENIZER = CharacterTokenizer()


class FakeEngine:
    """Answers every request with the text that ``answer`` gives for its id."""

    version = 3

    def __init__(self, answer: Callable[[str], tuple[str, FinishReason]]) -> None:
        self.answer = answer
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        text, reason = self.answer(request.request_id)
        tokens = np.asarray(TOKENIZER.encode(text), dtype=np.int32)
        at = np.full(len(tokens), self.version, dtype=np.int32)
        return Completion(request.request_id, tokens, np.zeros(len(tokens), np.float32), at, at, reason)

    async def abort(self, request_ids: Iterable[str]) -> None:
        raise AssertionError("nothing is aborted here")


class FakeTask:
    """Problem i asks "i"; reward is the completion as a number."""

    name = "fake"

    def __init__(self, num_train: int = 1000) -> None:
        self.num_train = num_train
        self.scored: list[str] = []

    def num_problems(self, split: str) -> int:
        return self.num_train if split == "train" else 3

    def problem(self, split: str, index: int) -> Problem:
        return Problem(f"{split}-{index}", str(index), None)

    def score(self, problems: Seq[Problem], texts: Seq[str], stopped: Seq[bool]) -> list[Score]:
        self.scored += texts
        return [Score(reward=float(text), correct=text == "1") for text in texts]


def make_sampler(
    engine: FakeEngine,
    task: FakeTask,
    runner: asyncio.Runner,
    *,
    max_tokens: int = 10,
    refills: int | None = None,
    max_failed_share: float = 1.0,
) -> GroupSampler:
    dynamic = DynamicSamplingConfig(enabled=refills is not None, max_refill_rounds=refills or 1)
    return GroupSampler(
        engine,  # pyright: ignore[reportArgumentType]
        task,  # pyright: ignore[reportArgumentType]
        PromptRenderer(TOKENIZER, PromptConfig(format="raw", max_tokens=max_tokens, overlong="skip")),
        TOKENIZER.decode,
        RolloutConfig(max_new_tokens=4),
        AlgorithmConfig(num_prompts=2, group_size=3, dynamic_sampling=dynamic, max_failed_share=max_failed_share),
        seed=5,
        stop_token_ids=(2,),
        runner=runner,
    )


@pytest.fixture
def runner():
    with asyncio.Runner() as runner:
        yield runner


def test_groups_come_in_prompt_order_with_a_seed_for_each_sample(runner: asyncio.Runner) -> None:
    engine, task = FakeEngine(lambda _: ("1", "stop")), FakeTask()
    sampled = make_sampler(engine, task, runner).sample(step=7, cursor=10)
    assert sampled.cursor == 12
    assert [r.problem.problem_id for r in sampled.rollouts] == ["train-10"] * 3 + ["train-11"] * 3
    assert len({request.sampling.seed for request in engine.requests}) == 6
    again = FakeEngine(lambda _: ("1", "stop"))
    make_sampler(again, FakeTask(), runner).sample(step=7, cursor=10)
    assert [r.sampling.seed for r in again.requests] == [r.sampling.seed for r in engine.requests]
    later = FakeEngine(lambda _: ("1", "stop"))
    make_sampler(later, FakeTask(), runner).sample(step=8, cursor=10)
    assert not {r.sampling.seed for r in later.requests} & {r.sampling.seed for r in engine.requests}


def test_equal_rewards_are_dropped_and_refilled_in_prompt_order(runner: asyncio.Runner) -> None:
    def answer(request_id: str) -> tuple[str, FinishReason]:
        cursor, member = (int(part) for part in request_id.split("/")[1:])
        return (str(member % 2) if cursor in (1, 4) else "1"), "stop"

    sampled = make_sampler(FakeEngine(answer), FakeTask(), runner, refills=5).sample(step=1, cursor=0)
    assert [r.group_id for r in sampled.rollouts] == ["step-1/1"] * 3 + ["step-1/4"] * 3
    assert sampled.cursor == 5
    assert sampled.num_dropped_groups == 3
    assert sampled.num_sampled_tokens == 15


def test_refilling_ends_and_the_step_goes_on_with_what_there_is(runner: asyncio.Runner) -> None:
    sampled = make_sampler(FakeEngine(lambda _: ("1", "stop")), FakeTask(), runner, refills=2).sample(1, 0)
    assert sampled.rollouts == ()
    assert sampled.num_dropped_groups == 6
    assert sampled.num_unscored_groups == 0


def test_dropped_groups_without_any_reward_are_told_from_those_of_equal_rewards(runner: asyncio.Runner) -> None:
    def answer(request_id: str) -> tuple[str, FinishReason]:
        cursor, member = (int(part) for part in request_id.split("/")[1:])
        return "1", "aborted" if cursor < 3 or member else "stop"  # three groups without a reward, then with one each

    sampled = make_sampler(FakeEngine(answer), FakeTask(), runner, refills=2).sample(1, 0)
    assert (sampled.num_dropped_groups, sampled.num_unscored_groups) == (6, 3)


def test_failures_in_dropped_groups_are_counted_with_the_others(runner: asyncio.Runner) -> None:
    """They count for ``max_failed_share``, so the metrics have to show them."""

    def answer(request_id: str) -> tuple[str, FinishReason]:
        cursor, member = (int(part) for part in request_id.split("/")[1:])
        reward = str(member % 2) if cursor in (1, 3) else "1"  # groups 0 and 2 are dropped
        return reward, "failed" if (cursor, member) in ((0, 0), (1, 2), (2, 1), (2, 2)) else "stop"

    sampled = make_sampler(FakeEngine(answer), FakeTask(), runner, refills=5).sample(1, 0)
    assert {r.group_id for r in sampled.rollouts} == {"step-1/1", "step-1/3"}
    row = unscored_counts(sampled.scores)
    assert (row["rollout/unscored"], row["rollout/failed"], len(sampled.scores)) == (4, 4, 12)
    all_dropped = make_sampler(FakeEngine(lambda _: ("1", "failed")), FakeTask(), runner, refills=1).sample(1, 0)
    assert all_dropped.rollouts == ()
    assert unscored_counts(all_dropped.scores)["rollout/failed"] == 12


# --- one meaning for each setting, in training and in evaluation -----------------------------------------------------


def test_one_length_limit_holds_in_training_and_in_evaluation(runner: asyncio.Runner) -> None:
    """verl-project/verl#3619: one option meant a turn in one place and a whole trajectory in another."""
    engine = FakeEngine(lambda _: ("1", "stop"))
    sampler = make_sampler(engine, FakeTask(), runner)
    sampler.sample(1, 0)
    num_training = len(engine.requests)
    sampler.evaluate(3, 1)
    assert 0 < num_training < len(engine.requests)
    assert {request.sampling.max_new_tokens for request in engine.requests} == {4}
    lengths = {dotted(key.path) for key in walk() if re.search("new_tokens|response|completion", key.path[-1])}
    assert lengths == {"rollout.max_new_tokens"}, "a second key for the length of a completion"


def test_evaluation_cannot_be_given_a_temperature_that_a_rollout_could_not_have(runner: asyncio.Runner) -> None:
    """THUDM/slime#2396: the temperature of the evaluation was not validated as the rollout's is."""
    assert [dotted(key.path) for key in walk() if key.path[-1] == "temperature"] == ["rollout.temperature"]
    with pytest.raises(ConfigError, match=r"rollout\.temperature"):
        load_recipe("tiny-qwen3-moe", ["rollout.temperature=-0.5"])
    with pytest.raises(ConfigError, match=r"eval\.temperature"):
        load_recipe("tiny-qwen3-moe", ["eval.temperature=-0.5"])
    engine = FakeEngine(lambda _: ("1", "stop"))
    make_sampler(engine, FakeTask(), runner).evaluate(3, 1)
    refused = replace(engine.requests[0].sampling, temperature=-0.5)
    assert _sampling_problem(engine.requests[0].sampling) is None
    assert "temperature" in str(_sampling_problem(refused)), "an engine holds every request to one rule"


@pytest.mark.parametrize(("reason", "status"), [("aborted", "aborted"), ("failed", "failed")])
def test_what_did_not_finish_is_not_scored_as_zero(runner: asyncio.Runner, reason: FinishReason, status: str) -> None:
    task = FakeTask()
    engine = FakeEngine(lambda request_id: ("1", reason if request_id.endswith("/0") else "stop"))
    rollouts = make_sampler(engine, task, runner).sample(1, 0).rollouts
    lost = [r for r in rollouts if r.rollout_id.endswith("/0")]
    assert [r.status for r in lost] == [status] * 2
    assert all(r.score.reward is None and r.score.error for r in lost)
    assert len(task.scored) == 4


def test_too_many_failures_stop_the_run_instead_of_training_on_the_rest(runner: asyncio.Runner) -> None:
    engine = FakeEngine(lambda request_id: ("1", "failed" if request_id.endswith("/0") else "stop"))
    with pytest.raises(GroupError, match=r"2 of 6 .*max_failed_share 0\.25"):
        make_sampler(engine, FakeTask(), runner, max_failed_share=0.25).sample(1, 0)
    assert make_sampler(engine, FakeTask(), runner, max_failed_share=0.34).sample(1, 0).rollouts


def test_a_cut_off_sample_is_scored_and_called_truncated(runner: asyncio.Runner) -> None:
    rollouts = make_sampler(FakeEngine(lambda _: ("1", "length")), FakeTask(), runner).sample(1, 0).rollouts
    assert {r.status for r in rollouts} == {"truncated"}
    assert all(r.score.reward == 1.0 for r in rollouts)


def test_evaluation_is_greedy_and_ends_with_the_held_out_problems(runner: asyncio.Runner) -> None:
    engine = FakeEngine(lambda _: ("1", "stop"))
    rollouts = make_sampler(engine, FakeTask(), runner).evaluate(num_problems=10, step=0)
    assert [r.problem.problem_id for r in rollouts] == ["heldout-0", "heldout-1", "heldout-2"]
    assert {request.sampling.temperature for request in engine.requests} == {0.0}


def test_only_overlong_prompts_is_an_error_and_not_an_endless_search(runner: asyncio.Runner) -> None:
    sampler = make_sampler(FakeEngine(lambda _: ("1", "stop")), FakeTask(), runner, max_tokens=1)
    with pytest.raises(GroupError, match=r"prompt\.max_tokens"):
        sampler.sample(1, 100)


def test_the_training_sequence_is_token_in_token_out() -> None:
    completion = Completion(
        "r",
        np.array([7, 8], np.int32),
        np.array([-0.5, -1.5], np.float32),
        np.array([3, 4], np.int32),
        np.array([3, 3], np.int32),
        "stop",
    )
    sequence = sequence_of(np.array([5, 6], np.int32), completion)
    assert sequence.tokens.tolist() == [5, 6, 7, 8]
    assert sequence.loss_mask.tolist() == [False, False, True, True]
    assert sequence.logprobs.tolist() == [0, 0, -0.5, -1.5]
    assert sequence.versions.tolist() == [-1, -1, 3, 4]
    assert sequence.kv_versions.tolist() == [-1, -1, 3, 3]


def test_seeds_differ_by_run_and_by_rollout() -> None:
    seeds = {stream_seed(run, f"step-{step}/{k}") for run in range(3) for step in range(20) for k in range(20)}
    assert len(seeds) == 1200
    assert all(0 <= seed < 2**63 for seed in seeds)
