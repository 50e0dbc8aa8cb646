"""Rewards: built-in ones, a user's own, abstention, failure and the weighted sum."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.records import Problem, Score
from lockstep.tasks import function_reward
from lockstep.tasks.errors import TaskError
from lockstep.tasks.extract import last_boxed, last_number, stated_answer
from lockstep.tasks.rewards import (
    FunctionReward,
    RewardSum,
    WeightedReward,
    arithmetic,
    exact,
    load_function,
    make_reward,
)

EIGHT = Problem("p", "5+3", "8", {"stop_bonus": 0.2})


def weighted(**functions) -> list[WeightedReward]:
    return [WeightedReward(FunctionReward(name, fn), weight) for name, (fn, weight) in functions.items()]


def score_one(rewards: RewardSum, text: str = "x", problem: Problem = EIGHT) -> Score:
    [score] = rewards.score([problem], [text], [True])
    return score


# --- extraction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", 8),
        ("5 + 3 = 8.", 8),
        ("5-3", 3),
        ("it is -2", -2),
        ("(−2)", -2),
        ("1,234", 1234),
        ("3.5", 3.5),
        ("8.0", 8),
    ],
)
def test_last_number_is_read_as_people_write_it(text, number):
    assert last_number(text) == number


@given(st.integers(-(10**30), 10**30), st.sampled_from(["", "So ", "5 + 3 is not 9; it is ", "x = "]))
def test_last_number_finds_any_integer(number, before):
    assert last_number(f"{before}{number}.") == number


def test_last_number_of_nothing_and_of_very_many_digits():
    assert last_number("none") is None
    assert last_number("9" * 10_000) is not None


def test_last_boxed_balances_braces():
    assert last_boxed(r"\boxed{\frac{1}{2}} then \boxed{{a}} b}") == "{a}"
    assert last_boxed(r"\boxed{1} and an open \boxed{2") == "1"
    assert last_boxed("no box") is None


@pytest.mark.parametrize(
    ("text", "num_lines", "answer"),
    [
        ("<answer>4</answer> no: <answer> 3 </answer>", 1, "3"),
        (r"so \boxed{3}", 1, "3"),
        ("The answer is 3.", 1, "3"),
        ("Answer: 3\nBecause it is.", 1, "3"),
        ("Let me see.\n3\n", 1, "3"),
        ("A grid:\n1 2\n3 4\n", 2, "1 2\n3 4"),
        ("", 1, ""),
    ],
)
def test_stated_answer_follows_its_order(text, num_lines, answer):
    assert stated_answer(text, num_lines) == answer


# --- built in ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stopped", "reward", "correct", "formatted"),
    [
        ("8", True, 1.2, True, True),
        (" 8\n", False, 1.0, True, True),
        ("5 + 3 = 8", True, 1.2, True, False),
        ("8.", True, 1.2, True, False),
        ("9", True, 0.0, False, True),
        ("8 or 9", True, 0.0, False, False),
        ("-8", True, 0.0, False, True),
        ("٨", True, 0.0, False, False),
        ("", True, 0.0, False, False),
    ],
)
def test_arithmetic_judges_value_form_and_stopping_apart(text, stopped, reward, correct, formatted):
    score = arithmetic(EIGHT, text, stopped)
    assert score == Score(reward, correct, formatted)


def test_exact_ignores_space_around_the_answer_only():
    assert exact(EIGHT, " 8 ", True) == Score(1.0, correct=True)
    assert exact(EIGHT, "8.", True) == Score(0.0, correct=False)


@pytest.mark.parametrize("name", ["arithmetic", "exact", "math_verify"])
def test_built_in_rewards_abstain_without_a_reference_answer(name):
    reward = make_reward(name)
    assert reward.score([Problem("p", "x", None)], ["3"], [True]) == [Score(None)]
    assert reward.gold(Problem("p", "x", None)) is None
    reward.close()


# --- sums, abstention, failure ----------------------------------------------------------------------------------------


def test_the_sum_is_weighted_and_takes_its_metric_from_the_first_reward():
    rewards = RewardSum(weighted(first=(lambda p, c, s: 1.0, 2.0), second=(lambda p, c, s: -3.0, 0.5)))
    assert score_one(rewards) == Score(0.5, correct=True, parts={"first": 1.0, "second": -3.0})


def test_abstaining_rewards_leave_the_sum_and_all_abstaining_gives_none():
    rewards = RewardSum(weighted(first=(lambda p, c, s: None, 1.0), second=(lambda p, c, s: 0.25, 2.0)))
    assert score_one(rewards) == Score(0.5, parts={"first": None, "second": 0.25})
    silent = RewardSum(weighted(first=(lambda p, c, s: None, 1.0)))
    assert score_one(silent) == Score(None, parts={"first": None})


def test_a_grader_that_raises_yields_an_error_and_no_reward_also_beside_others():
    def broken(problem, completion, stopped):
        if completion == "bad":
            raise KeyError("lost")
        return 1.0

    rewards = RewardSum(weighted(broken=(broken, 1.0), shape=(lambda p, c, s: 0.1, 1.0)))
    good, bad = rewards.score([EIGHT, EIGHT], ["good", "bad"], [True, True])
    assert good.reward == pytest.approx(1.1)
    assert bad.reward is None
    assert bad.correct is None
    assert bad.error == "broken: KeyError: 'lost'"
    assert bad.parts == {"broken": None, "shape": 0.1}


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SystemExit(0), "own: SystemExit: 0"),
        (SystemExit(), "own: SystemExit"),
        (GeneratorExit(), "own: GeneratorExit"),
        (asyncio.CancelledError(), "own: asyncio.exceptions.CancelledError"),
        (BaseException("odd"), "own: BaseException: odd"),
        (StopIteration(1), "own: StopIteration: 1"),
        (MemoryError(), "own: MemoryError"),
        (Unprintable(), "own: tests.unit.test_rewards.Unprintable: <exception str() failed>"),
    ],
)
def test_nothing_that_a_reward_raises_ends_the_run(error, message):
    def own(problem, completion, stopped):
        raise error

    assert score_one(RewardSum(weighted(own=(own, 1.0)))) == Score(None, parts={"own": None}, error=message)


def test_an_interrupt_by_the_person_passes():
    def own(problem, completion, stopped):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_one(RewardSum(weighted(own=(own, 1.0))))


@pytest.mark.parametrize(
    ("value", "number", "correct"),
    [
        (1, 1.0, True),
        (True, 1.0, True),
        (np.float32(0.5), 0.5, False),
        (np.float16(1), 1.0, True),
        (np.int64(-2), -2.0, False),
        (np.bool_(True), 1.0, True),
        (np.bool_(False), 0.0, False),
        (Fraction(1, 4), 0.25, False),
        (Score(np.float32(0.5), correct=np.bool_(True)), 0.5, True),  # type: ignore[arg-type]
        (Score(2), 2.0, None),
        (1e9, 1e9, True),
    ],
)
def test_any_real_number_is_a_reward_and_comes_out_as_pythons_own(value, number, correct):
    score = score_one(RewardSum(weighted(own=(lambda p, c, s: value, 1.0))))
    assert score == Score(number, correct, parts={"own": number})
    assert type(score.reward) is float
    assert score.correct is correct


ODD = [math.nan, math.inf, -math.inf, Score(math.nan), "1", [1.0], 1j, Score("1"), np.str_("1"), np.complex64(1)]  # type: ignore[arg-type]
HUGE = [1.1e9, -1e30, 10**400, np.float32(2e9), Score(1e10), np.float64(math.nan)]


@pytest.mark.parametrize("name", ["correct", "formatted"])
@pytest.mark.parametrize(
    ("flag", "taken"),
    [(True, True), (np.bool_(False), False), (1, True), (0.0, False), (None, None)]
    + [(flag, "error") for flag in (0.3, "no", math.nan, [], np.float32(0.9))],
)
def test_what_is_neither_right_nor_wrong_is_no_flag_of_a_score(name: str, flag: object, taken: object) -> None:
    """Truth as Python has it made 0.3 and "no" right answers in the accuracy and in dynamic sampling."""
    score = score_one(RewardSum(weighted(own=(lambda *_: Score(0.5, **{name: flag}), 1.0))))
    if taken == "error":
        assert score.reward is None
        assert f"a Score whose {name} is " in str(score.error)
    else:
        assert (score.reward, score.error, getattr(score, name)) == (0.5, None, taken)


@pytest.mark.parametrize("value", [*ODD, *HUGE])
def test_rewards_that_are_no_number_of_sensible_size_are_errors(value):
    score = score_one(RewardSum(weighted(odd=(lambda p, c, s: value, 1.0))))
    assert score.reward is None
    assert str(score.error).startswith("odd: returned ")


def test_a_row_may_be_judged_by_the_reward_that_it_names():
    rewards = RewardSum(weighted(first=(lambda p, c, s: 1.0, 1.0)), [FunctionReward("exact", exact)], task_key="kind")
    own = Problem("own", "x", "8", {"kind": "exact"})
    default = Problem("default", "x", "8", {"kind": None})
    scores = rewards.score([own, default, own], ["8", "8", "7"], [True, True, True])
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0]
    assert [list(score.parts) for score in scores] == [["exact"], ["first"], ["exact"]]


def test_a_weighted_sum_of_absurd_size_is_an_error_too():
    score = score_one(RewardSum(weighted(big=(lambda p, c, s: 1e6, 1e6))))
    assert (score.reward, score.error) == (
        None,
        "the weighted sum is 1e+12; a reward must lie within ±1e+09, scale it down",
    )


@pytest.mark.parametrize("weight", [0, 0.0, -0.0, math.nan, math.inf, -math.inf])
def test_weights_that_teach_nothing_are_refused_with_the_way_out(weight):
    with pytest.raises(TaskError, match=r"reward 'own' has weight .*remove the reward, or give it a finite weight"):
        WeightedReward(FunctionReward("own", exact), weight)


def test_a_reward_that_hangs_is_named_with_the_problem_that_it_is_at(monkeypatch, caplog):
    monkeypatch.setattr(function_reward, "SLOW_S", 0.02)

    def slow(problem, completion, stopped):
        deadline = time.monotonic() + 5
        while problem.problem_id == "stuck" and not caplog.records and time.monotonic() < deadline:
            time.sleep(0.005)
        return 1.0

    FunctionReward("slow", slow).score([EIGHT, Problem("stuck", "q", "1")], ["x", "x"], [True, True])
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "reward slow has been scoring for 0.02 s: 1 of 2 completions are done, the next is of problem stuck" in (
        record.getMessage()
    )


def test_a_reward_that_is_quick_is_not_named_and_leaves_no_timer(caplog):
    threads = threading.active_count()
    FunctionReward("quick", exact).score([EIGHT] * 3, ["x"] * 3, [True] * 3)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(timeout=5)
    assert threading.active_count() <= threads
    assert not caplog.records


def test_reward_names_must_differ():
    with pytest.raises(TaskError, match="each once"):
        RewardSum([WeightedReward(FunctionReward("a", exact)), WeightedReward(FunctionReward("a", exact))])


# --- import paths -----------------------------------------------------------------------------------------------------

NOT_A_FUNCTION = 3


def own_reward(problem: Problem, completion: str, stopped: bool) -> float:
    return float(len(completion))


def wrong_signature(completion: str) -> float:
    return 0.0


async def coroutine(problem, completion, stopped):
    return 0.0


def test_a_users_reward_is_loaded_by_import_path(monkeypatch, tmp_path):
    (tmp_path / "my_rewards_for_test.py").write_text("def shout(problem, completion, stopped):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert score_one(RewardSum([WeightedReward(make_reward("my_rewards_for_test:shout"))])).reward == 1.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys\nsys.exit(0)\n", "importing module 'faulty_rewards_for_test' failed: SystemExit: 0"),
        ("def f(:\n", "failed: .*\n[\\s\\S]*SyntaxError"),
        ("1 / 0\n", "failed: ZeroDivisionError: division by zero"),
        ("from math import nothing\n", "failed: ImportError: cannot import name 'nothing'"),
    ],
)
def test_a_module_that_fails_when_imported_is_refused_with_the_reason(monkeypatch, tmp_path, source, message):
    (tmp_path / "faulty_rewards_for_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match=message):
        load_function("faulty_rewards_for_test:f")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("aritmetic", "neither built in"),
        ("no_such_module_here:f", "'no_such_module_here' can't be found"),
        ("math:no_such_function", "has no function 'no_such_function'"),
        (f"{__name__}:NOT_A_FUNCTION", "has no function"),
        (f"{__name__}:wrong_signature", r"must take \(problem, completion, stopped\)"),
        (f"{__name__}:coroutine", "coroutine"),
    ],
)
def test_faulty_import_paths_are_refused_with_the_reason(path, message):
    with pytest.raises(TaskError, match=message):
        load_function(path)
