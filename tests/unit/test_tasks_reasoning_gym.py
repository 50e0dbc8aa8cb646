"""reasoning-gym tasks: the oracle scores full marks, answers are extracted, items are the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from lockstep.config.schema import ReasoningGymTask
from lockstep.records import Problem
from lockstep.tasks import gym_items
from lockstep.tasks.build import build_task, prove_gold
from lockstep.tasks.errors import TaskError
from lockstep.tasks.rewards import GymReward

SAMPLE = (
    "basic_arithmetic", "binary_matrix", "bitwise_arithmetic", "chain_sum", "complex_arithmetic", "countdown",
    "graph_color", "leg_counting", "letter_counting", "mini_sudoku", "number_sorting", "polynomial_equations",
    "propositional_logic", "rubiks_cube", "simple_equations", "spiral_matrix", "word_sorting",
)  # fmt: skip


@pytest.fixture(scope="module")
def gym_reward():
    reward = GymReward({}, timeout_s=60.0)
    yield reward
    reward.close()


def make_problems(name: str, num: int = 2) -> list[Problem]:
    options: dict[str, Any] = {}
    if name == "composite":
        options = {"datasets": [{"name": "chain_sum"}, {"name": "lcm"}]}
    items = gym_items.make_items(name, options, seed=1, num_train=num, num_heldout=num)
    assert items["rejected"] == []
    return [
        Problem(f"{name}/{index}", entry["question"], gold, {**entry, "dataset": name})
        for index, entry, gold in items["heldout"] + items["train"]
    ]


@pytest.mark.parametrize("name", SAMPLE)
def test_the_oracle_scores_full_marks_on_each_item(gym_reward, name):
    problems = make_problems(name, num=3)
    scores = gym_reward.score(problems, [gym_reward.gold(p) for p in problems], [True] * len(problems))
    assert [(s.reward, s.correct, s.formatted, s.error) for s in scores] == [(1.0, True, True, None)] * len(problems)


@pytest.mark.slow
def test_the_oracle_scores_full_marks_in_all_datasets_but_those_without_a_reference_answer():
    refused, failing = set(), {}
    reward = GymReward({"composite": {"datasets": [{"name": "chain_sum"}, {"name": "lcm"}]}}, timeout_s=60.0)
    for name in sorted(gym_items.DATASETS):
        try:
            problems = make_problems(name)
        except ValueError:
            refused.add(name)
            continue
        scores = reward.score(problems, [str(reward.gold(p)) for p in problems], [True] * len(problems))
        failing |= {p.problem_id: s for p, s in zip(problems, scores, strict=True) if s.correct is not True}
    reward.close()
    assert refused == set(gym_items.NO_GOLD)
    assert failing == {}
    assert len(gym_items.DATASETS) >= 100


def test_an_answer_is_extracted_before_it_is_scored(gym_reward):
    [problem] = make_problems("chain_sum")[:1]
    texts = [f"Let me add. The answer is {problem.answer}.", f"{problem.answer}", f"{problem.answer}0 or so"]
    scores = gym_reward.score([problem] * 3, texts, [True] * 3)
    assert [score.reward for score in scores[:2]] == [1.0, 1.0]
    assert scores[2].reward is not None
    assert scores[2].reward < 1.0
    assert [score.formatted for score in scores] == [False] * 3


def test_the_task_is_disjoint_proved_and_asks_for_the_tag():
    task = build_task(ReasoningGymTask(dataset="lcm", num_train=40, num_heldout=8, options={"max_value": 30}))
    try:
        train = [task.problem("train", i) for i in range(task.num_problems("train"))]
        heldout = [task.problem("heldout", i) for i in range(task.num_problems("heldout"))]
        assert (len(train), len(heldout)) == (40, 8)
        assert not {p.prompt for p in train} & {p.prompt for p in heldout}
        assert all(str(p.prompt).endswith("Give the final answer between <answer> and </answer>.") for p in train)
        assert prove_gold(task, 48).num_proved == 48
    finally:
        task.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["list_functions", "word_ladder", "isomorphic_strings"])
def test_items_are_the_same_in_every_process(name):
    """These draw from global generators or iterate over sets of strings, whose order changes by process."""
    code = (
        "from lockstep.config.schema import ReasoningGymTask\n"
        "from lockstep.tasks.reasoning_gym import _make_items\n"
        f"items = _make_items(ReasoningGymTask(dataset={name!r}, num_train=4, num_heldout=2))\n"
        "print([entry['question'] for _, entry, _ in items['train']])\n"
    )
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    )
    assert first == second
    assert len(first) > 50


class FakeDataset(NamedTuple):
    """Stands for an upstream dataset with given answers and its own marks for them."""

    entries: list[dict[str, Any]]
    marks: list[float]

    def __getitem__(self, index):
        return self.entries[index % len(self.entries)]

    def score_answer(self, answer, entry):
        return self.marks[entry["metadata"]["i"]]


def fake(monkeypatch, marks: list[float], num_questions: int = 1000) -> None:
    entries = [
        {"question": f"q{i % num_questions}", "answer": "1", "metadata": {"i": i, "source_dataset": "fake"}}
        for i in range(len(marks))
    ]
    monkeypatch.setattr(gym_items, "create", lambda name, options: FakeDataset(entries, marks))


def test_items_whose_own_answer_fails_are_left_out_and_counted(monkeypatch):
    fake(monkeypatch, [0.5 if i == 3 else 1.0 for i in range(100)])
    items = gym_items.make_items("fake", {}, 0, num_train=20, num_heldout=5)
    assert items["rejected"] == ["item 3: '1' scores 0.5"]
    assert 3 not in [index for index, _, _ in items["train"] + items["heldout"]]
    assert (len(items["train"]), len(items["heldout"])) == (20, 5)


def test_a_dataset_whose_own_answers_mostly_fail_is_refused(monkeypatch):
    fake(monkeypatch, [0.5 if i % 2 else 1.0 for i in range(100)])
    with pytest.raises(ValueError, match=r"\d+ of \d+ items do not score full marks .* item 1: '1' scores 0\.5"):
        gym_items.make_items("fake", {}, 0, num_train=20, num_heldout=5)


def test_too_few_different_questions_are_refused(monkeypatch):
    fake(monkeypatch, [1.0] * 100, num_questions=4)
    with pytest.raises(ValueError, match=r"hold only 4 different questions; 5 are to be held out"):
        gym_items.make_items("fake", {}, 0, num_train=20, num_heldout=5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sum", {"max_term": 3}, r"'chain_sum' refuses its options .*max_term"),
        ("rush_hour", {}, r"'rush_hour' can't be used: upstream makes no reference solution"),
    ],
)
def test_datasets_that_cannot_be_made_are_refused_with_the_reason(name, options, message):
    with pytest.raises(ValueError, match=message):
        gym_items.make_items(name, options, 0, 2, 2)


def test_what_the_child_process_refuses_reaches_the_caller():
    with pytest.raises(TaskError, match=r"no dataset 'chainsum'; nearest: chain_sum"):
        build_task(ReasoningGymTask(dataset="chainsum"))
    with pytest.raises(TaskError, match=r"must not set \['seed'\]"):
        build_task(ReasoningGymTask(dataset="chain_sum", options={"seed": 3}))


def test_a_row_that_is_no_item_is_an_error_not_a_wrong_answer(gym_reward):
    [score] = gym_reward.score([Problem("p", "q", "1", {"prompt": "q"})], ["1"], [True])
    assert score.reward is None
    assert "no reasoning-gym item" in str(score.error)
