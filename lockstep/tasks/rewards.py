"""Reward functions, built in or by import path, and their weighted sum.

A reward judges one completion and says a number, a ``Score``, or None: it abstains. The sum is over the rewards that
did not abstain. A grader that *fails* is something else than an answer that is wrong or a reward that abstains: the
score then has ``reward=None`` and an ``error``, so that the sample leaves its group's baseline.

The first reward listed for a problem is the task's metric: ``correct`` and ``formatted`` are what it says. A plain
number is correct from 1.0 on.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, cast

from lockstep.records import Problem, Score
from lockstep.tasks.errors import TaskError
from lockstep.tasks.extract import last_boxed, last_number, last_tagged, stated_answer
from lockstep.tasks.function_reward import FunctionReward, RewardFunction, said, size_fault
from lockstep.tasks.grader_pool import GradeResult, GraderPool
from lockstep.tasks.math_grader import DEFAULT_TIMEOUT_S, MathGrader, default_num_workers


class Reward(Protocol):
    """One reward over a batch. ``Score.reward`` None without ``error``: it abstains."""

    name: str

    def score(self, problems: Seq[Problem], texts: Seq[str], stopped: Seq[bool]) -> list[Score]: ...

    def gold(self, problem: Problem) -> str | None:
        """A completion that scores full marks; None if the problem has no reference answer."""
        ...

    def close(self) -> None: ...


def arithmetic(problem: Problem, completion: str, stopped: bool) -> Score | None:
    """1 if the last number of the completion is the answer, and ``row["stop_bonus"]`` more if it then stopped.

    ``formatted``: the completion is the number and nothing else. Abstains without a reference answer.
    """
    if problem.answer is None:
        return None
    expected = last_number(problem.answer)
    if expected is None:
        raise ValueError(f"the reference answer {problem.answer!r} holds no number")
    found = last_number(completion)
    correct = found == expected
    digits = completion.strip().removeprefix("-")
    bonus = float(problem.row.get("stop_bonus", 0.0))  # type: ignore[arg-type]
    return Score(
        reward=1.0 + (bonus if stopped else 0.0) if correct else 0.0,
        correct=correct,
        formatted=digits.isascii() and digits.isdigit(),
    )


def exact(problem: Problem, completion: str, stopped: bool) -> Score | None:
    """1 if the completion is the reference answer, apart from space around it. Abstains without one."""
    if problem.answer is None:
        return None
    correct = completion.strip() == problem.answer.strip()
    return Score(reward=float(correct), correct=correct)


def _from_grade(result: GradeResult, formatted: bool) -> Score:
    if result.score is None:
        return Score(None, error=result.error)
    return Score(result.score, correct=result.score >= 1.0, formatted=formatted)


class MathReward:
    r"""1 if math-verify finds the completion's answer equal to the reference. ``formatted``: it has a ``\boxed{}``."""

    name = "math_verify"

    def __init__(self, num_workers: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.grader = MathGrader(num_workers, timeout_s)

    def score(self, problems: Seq[Problem], texts: Seq[str], stopped: Seq[bool]) -> list[Score]:
        pairs = [(p.answer, text) for p, text in zip(problems, texts, strict=True) if p.answer is not None]
        grades = iter(self.grader.grade(pairs))
        return [
            Score(None) if p.answer is None else _from_grade(next(grades), last_boxed(text) is not None)
            for p, text in zip(problems, texts, strict=True)
        ]

    def gold(self, problem: Problem) -> str | None:
        answer = problem.answer
        return answer if answer is None or last_boxed(answer) is not None else rf"\boxed{{{answer}}}"

    def close(self) -> None:
        self.grader.close()


class GymReward:
    """The score of the row's reasoning-gym dataset for the extracted answer (``extract.stated_answer``).

    The row is an item as reasoning-gym makes it: ``question``, ``answer``, ``metadata``; ``row["dataset"]``, or else
    the metadata's ``source_dataset``, says whose. ``options`` maps a dataset's name to its own options. Scored in
    killable processes, because some upstream graders evaluate the answer. ``formatted``: it has an answer tag.
    """

    name = "reasoning_gym"

    def __init__(self, options: dict[str, dict[str, object]], timeout_s: float = 10.0) -> None:
        self._options = options
        self._pool = GraderPool("reasoning_gym", default_num_workers(), timeout_s)

    def score(self, problems: Seq[Problem], texts: Seq[str], stopped: Seq[bool]) -> list[Score]:
        scores: list[Score | None] = []
        requests = []
        for problem, text in zip(problems, texts, strict=True):
            metadata = problem.row.get("metadata")
            dataset = problem.row.get("dataset") or (
                metadata.get("source_dataset") if isinstance(metadata, dict) else ""
            )
            if not dataset or "answer" not in problem.row:
                wrong = "the row is no reasoning-gym item (question, answer, metadata with source_dataset)"
                scores.append(Score(None, error=wrong))
                continue
            answer = stated_answer(text, num_lines=len((problem.answer or "").strip().splitlines()) or 1)
            requests.append((dataset, self._options.get(str(dataset), {}), answer, problem.row))
            scores.append(None)
        grades = iter(self._pool.grade(requests))
        return [
            score if score is not None else _from_grade(next(grades), last_tagged(text) is not None)
            for score, text in zip(scores, texts, strict=True)
        ]

    def gold(self, problem: Problem) -> str | None:
        return None if problem.answer is None else f"<answer>{problem.answer}</answer>"

    def close(self) -> None:
        self._pool.close()


BUILT_IN: tuple[str, ...] = ("arithmetic", "exact", "math_verify", "reasoning_gym")
"""Names of the built-in rewards; anything else is an import path."""


def make_reward(name: str, gym_options: dict[str, dict[str, object]] | None = None) -> Reward:
    """A reward by its configured name. Raises TaskError with what is wrong about an import path."""
    if name == "arithmetic":
        return FunctionReward(name, arithmetic)
    if name == "exact":
        return FunctionReward(name, exact)
    if name == "math_verify":
        return MathReward()
    if name == "reasoning_gym":
        return GymReward(gym_options or {})
    return FunctionReward(name, load_function(name))


def load_function(path: str) -> RewardFunction:
    """Import ``package.module:function``. Only ever called with a name from the configuration, never from data."""
    module_name, separator, attribute = path.partition(":")
    if not separator or not attribute:
        raise TaskError(f"reward {path!r} is neither built in ({', '.join(BUILT_IN)}) nor 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise TaskError(
            f"reward {path!r}: module {error.name!r} can't be found; install it or put its folder on PYTHONPATH"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a script that runs when imported would end the run with success
        raise TaskError(f"reward {path!r}: importing module {module_name!r} failed: {said(error)}") from error
    function = vars(module).get(attribute)
    if not callable(function):
        raise TaskError(f"reward {path!r}: module {module_name!r} has no function {attribute!r}")
    if inspect.iscoroutinefunction(function):
        raise TaskError(f"reward {path!r} is a coroutine function; a plain function is needed")
    try:
        inspect.signature(function).bind(None, "", True)
    except (TypeError, ValueError) as error:
        raise TaskError(f"reward {path!r} must take (problem, completion, stopped): {error}") from error
    return cast(RewardFunction, function)


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward and its factor in the sum. Raises TaskError for a factor of 0 or none that is finite."""

    reward: Reward
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight == 0 or not math.isfinite(self.weight):
            raise TaskError(
                f"reward {self.reward.name!r} has weight {self.weight}: nothing could be learned from it; remove the "
                "reward, or give it a finite weight other than 0"
            )


class RewardSum:
    """The weighted sum of rewards over those that did not abstain.

    ``per_row`` are further rewards that a row may name in its column ``task_key``; a row that names one is judged by
    that one alone. All abstained: ``reward`` None. A grader failed: ``reward`` None and ``error``.
    """

    def __init__(self, rewards: Seq[WeightedReward], per_row: Seq[Reward] = (), task_key: str | None = None) -> None:
        names = [entry.reward.name for entry in rewards]
        if not names or len(set(names)) != len(names):
            raise TaskError(f"rewards must be at least one, each once: {names}")
        self._default = tuple(rewards)
        self._by_name = {reward.name: WeightedReward(reward) for reward in per_row} | {
            entry.reward.name: entry for entry in rewards
        }
        self._task_key = task_key

    def _for(self, problem: Problem) -> tuple[WeightedReward, ...]:
        if self._task_key is None or problem.row.get(self._task_key) is None:
            return self._default
        return (self._by_name[str(problem.row[self._task_key])],)

    def score(self, problems: Seq[Problem], texts: Seq[str], stopped: Seq[bool]) -> list[Score]:
        """Scores of completions, in order. Each reward sees the samples that it judges in one batch."""
        if not len(problems) == len(texts) == len(stopped):
            raise ValueError(f"{len(problems)} problems, {len(texts)} texts and {len(stopped)} stop flags")
        plans = [self._for(problem) for problem in problems]
        parts: list[dict[str, Score]] = [{} for _ in problems]
        for name, entry in self._by_name.items():
            mine = [i for i, plan in enumerate(plans) if any(each.reward.name == name for each in plan)]
            if not mine:
                continue
            scores = entry.reward.score(
                [problems[i] for i in mine], [texts[i] for i in mine], [stopped[i] for i in mine]
            )
            for i, score in zip(mine, scores, strict=True):
                parts[i][name] = score
        return [_combine(plan, part) for plan, part in zip(plans, parts, strict=True)]

    def gold(self, problem: Problem) -> str | None:
        """A completion that scores full marks with the problem's metric; None if there is no reference answer."""
        return self._for(problem)[0].reward.gold(problem)

    def names(self, problems: Seq[Problem]) -> tuple[str, ...]:
        """Names of the rewards that judge these problems, each once."""
        return tuple(dict.fromkeys(entry.reward.name for problem in problems for entry in self._for(problem)))

    def close(self) -> None:
        """End the processes of all graders."""
        for entry in self._by_name.values():
            entry.reward.close()


def _combine(plan: Seq[WeightedReward], scores: dict[str, Score]) -> Score:
    parts = {entry.reward.name: scores[entry.reward.name].reward for entry in plan}
    errors = [f"{name}: {score.error}" for name, score in scores.items() if score.error is not None]
    if errors:
        # Left out of the sum, a failed part would count as 0 next to its group's peers (NVIDIA-NeMo/RL#431).
        return Score(None, parts=parts, error="; ".join(errors))
    metric = scores[plan[0].reward.name]
    known = [entry.weight * value for entry in plan if (value := parts[entry.reward.name]) is not None]
    if not known:
        return Score(None, metric.correct, metric.formatted, parts)
    total = sum(known)
    if fault := size_fault(total):
        return Score(None, parts=parts, error=f"the weighted sum is {fault}")
    return Score(total, metric.correct, metric.formatted, parts)
