"""Tasks: splits, order, arithmetic, and the proof that gold answers score full marks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.schema import ArithmeticTask, RewardConfig
from lockstep.interfaces import Task
from lockstep.records import Problem, Score
from lockstep.tasks.build import build_task, prove_gold
from lockstep.tasks.errors import TaskError
from lockstep.tasks.listed import ListedTask, epoch_order
from lockstep.tasks.rewards import FunctionReward, RewardSum, WeightedReward, exact


def split_ids(task: Task, split) -> list[str]:
    return [task.problem(split, i).problem_id for i in range(task.num_problems(split))]


def listed(reward=exact, answer: str | None = "1", num: int = 5, name: str = "mine") -> ListedTask:
    problems = [Problem(f"p{i}", f"question {i}", answer) for i in range(num)]
    rewards = RewardSum([WeightedReward(FunctionReward("own", reward))])
    return ListedTask(name, problems[1:], problems[:1], rewards, seed=3)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_the_default_sums_are_336_to_train_on_and_64_held_out():
    task = build_task(ArithmeticTask())
    train, heldout = split_ids(task, "train"), split_ids(task, "heldout")
    assert (len(train), len(heldout)) == (336, 64)
    assert set(train) | set(heldout) == {f"arithmetic/{a}+{b}" for a in range(1, 21) for b in range(1, 21)}
    assert len(set(train) | set(heldout)) == 400
    problem = task.problem("train", 0)
    a, b = problem.row["a"], problem.row["b"]
    assert problem.prompt == f"What is {a} + {b}? Answer with just the number."
    assert problem.answer == str(int(str(a)) + int(str(b)))


@settings(max_examples=25, deadline=None)
@given(
    low=st.integers(0, 5),
    width=st.integers(1, 6),
    operations=st.sampled_from([("+",), ("-", "*"), ("+", "-", "*")]),
    seed=st.integers(0, 3),
    num_heldout=st.integers(1, 3),
)
def test_splits_are_disjoint_complete_and_every_gold_scores_full_marks(low, width, operations, seed, num_heldout):
    config = ArithmeticTask(
        min_operand=low, max_operand=low + width, operations=operations, seed=seed, num_heldout=num_heldout
    )
    task = build_task(config)
    train, heldout = set(split_ids(task, "train")), set(split_ids(task, "heldout"))
    assert len(heldout) == num_heldout
    assert not train & heldout
    assert len(train) + len(heldout) == (width + 1) ** 2 * len(operations)
    problems = [task.problem("train", i) for i in range(task.num_problems("train"))]
    scores = task.score(problems, [task.gold(p) for p in problems], [True] * len(problems))
    assert {(score.reward, score.correct, score.formatted) for score in scores} == {(1.2, True, True)}


def test_the_split_follows_the_seed_only():
    same = [split_ids(build_task(ArithmeticTask(seed=4)), "heldout") for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != split_ids(build_task(ArithmeticTask(seed=5)), "heldout")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ArithmeticTask(num_heldout=400), r"leaves nothing to train on.*400 problems"),
        (ArithmeticTask(min_operand=3, max_operand=2), r"min_operand 3 is above"),
        (ArithmeticTask(template="{a} plus {c}"), r"can't be filled in: KeyError\('c'\)"),
        (ArithmeticTask(template="{a} plus"), r"lacks \['b'\]"),
        (ArithmeticTask(operations=("+", "-"), template="{a} and {b}"), r"lacks \['op'\]"),
        (ArithmeticTask(operations=("+", "+")), r"each once"),
        (ArithmeticTask(rewards=(RewardConfig(name="arithmetics"),)), r"neither built in"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, message):
    with pytest.raises(TaskError, match=message):
        build_task(config)


# --- order ------------------------------------------------------------------------------------------------------------


@given(num=st.integers(1, 40), epoch=st.integers(0, 5), seed=st.integers(0, 5))
def test_each_epoch_shows_every_problem_once_in_its_own_order(num, epoch, seed):
    order = epoch_order(num, seed, epoch)
    assert sorted(order) == list(range(num))
    if num > 20:
        assert list(order) != list(epoch_order(num, seed, epoch + 1))


def test_a_cursor_is_all_that_resuming_needs():
    straight, resumed = build_task(ArithmeticTask()), build_task(ArithmeticTask())
    indices = [0, 335, 336, 1000, 10_000]
    expected = [straight.problem("train", i) for i in indices]
    assert [resumed.problem("train", i) for i in reversed(indices)] == expected[::-1]


def test_held_out_problems_keep_their_order_and_wrap_around():
    task = build_task(ArithmeticTask())
    assert [task.problem("heldout", i) for i in range(64)] == [task.problem("heldout", 64 + i) for i in range(64)]
    with pytest.raises(IndexError):
        task.problem("train", -1)


def test_empty_splits_and_repeated_ids_are_refused():
    with pytest.raises(TaskError, match="'mine' has no train problem"):
        listed(num=1)
    rewards = RewardSum([WeightedReward(FunctionReward("own", exact))])
    problem = Problem("twice", "q", "1")
    with pytest.raises(TaskError, match="split train are not unique"):
        ListedTask("mine", [problem, problem], [problem], rewards, 0)


# --- gold proof -------------------------------------------------------------------------------------------------------


def test_gold_is_proved_for_both_splits():
    proof = prove_gold(build_task(ArithmeticTask()), num_problems=16)
    assert (proof.num_proved, proof.num_unproved) == (32, 0)
    assert str(proof) == "gold answers score full marks: 32 of 32 problems"


def test_a_gold_answer_that_is_judged_wrong_stops_with_the_problems_name():
    def off_by_one(problem: Problem, completion: str, stopped: bool) -> float:
        return 0.9 if problem.problem_id == "p0" else 1.0

    with pytest.raises(TaskError, match=r"1 of 5 gold answers .*\n  p0: gold '1' is judged wrong \(reward 0.9"):
        prove_gold(listed(off_by_one))


def test_a_graded_reward_that_is_taken_for_wrong_is_told_the_way_out():
    with pytest.raises(TaskError, match=r"5 of 5 gold answers [\s\S]*returns Score\(reward, correct=None\)"):
        prove_gold(listed(lambda problem, completion, stopped: 0.5))
    graded = prove_gold(listed(lambda problem, completion, stopped: Score(0.5, correct=None)))
    assert (graded.num_proved, graded.num_unproved) == (0, 5)


def test_the_proof_says_what_it_runs_before_it_runs_it():
    events = []

    def noisy(problem: Problem, completion: str, stopped: bool) -> float:
        events.append("scored")
        return 1.0

    prove_gold(listed(noisy), say=events.append)
    assert events == ["proving 5 gold answers with reward own", *["scored"] * 5]
    events.clear()
    prove_gold(listed(noisy, answer=None), say=events.append)
    assert events == []


def test_the_proof_names_only_the_rewards_that_judge_the_rows():
    rewards = RewardSum(
        [WeightedReward(FunctionReward("first", exact)), WeightedReward(FunctionReward("second", exact))],
        [FunctionReward("own", exact), FunctionReward("unused", exact)],
        task_key="kind",
    )
    problems = [Problem("a", "q", "1", {"kind": "own"}), Problem("b", "q", "1"), Problem("c", "q", "1")]
    said: list[str] = []
    prove_gold(ListedTask("mine", problems[:2], problems[2:], rewards, seed=0), say=said.append)
    [line] = said
    assert line.startswith("proving 3 gold answers with rewards ")
    assert set(line.removeprefix("proving 3 gold answers with rewards ").split(", ")) == {"own", "first", "second"}


def test_a_grader_that_fails_on_gold_stops_with_its_error():
    def broken(problem: Problem, completion: str, stopped: bool) -> float:
        raise RuntimeError("no licence")

    with pytest.raises(TaskError, match=r"p\d: gold '1' could not be graded: own: RuntimeError: no licence"):
        prove_gold(listed(broken))


def test_without_reference_answers_the_proof_says_that_it_proved_nothing():
    proof = prove_gold(listed(answer=None))
    assert (proof.num_proved, proof.num_unproved) == (0, 5)
    assert "5 could not be judged (no reference answer" in str(proof)
    with pytest.raises(TaskError, match="p0 has no reference answer"):
        listed(answer=None).gold(Problem("p0", "q", None))


def test_a_reward_without_a_notion_of_correct_is_counted_as_unproved():
    proof = prove_gold(listed(lambda problem, completion, stopped: Score(-0.5)))
    assert (proof.num_proved, proof.num_unproved) == (0, 5)


def test_building_tasks_imports_no_torch():
    code = "import sys, lockstep.tasks.build; print('torch' in sys.modules, 'reasoning_gym' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
