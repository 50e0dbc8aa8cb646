"""Builds a task from its configuration, and proves that its graders agree with its data."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from lockstep.config.schema import ArithmeticTask, FileTask, ReasoningGymTask, TaskConfig
from lockstep.interfaces import Task
from lockstep.records import Problem, Score
from lockstep.tasks.arithmetic import make_arithmetic
from lockstep.tasks.errors import TaskError
from lockstep.tasks.files import make_file_task
from lockstep.tasks.listed import ListedTask
from lockstep.tasks.reasoning_gym import make_reasoning_gym
from lockstep.tasks.rewards import BUILT_IN, RewardSum, WeightedReward, make_reward


def build_task(config: TaskConfig) -> Task:
    """The configured task. Raises TaskError for data or rewards that can't be used; call ``close`` when done."""
    rewards = _build_rewards(config)
    try:
        if isinstance(config, ArithmeticTask):
            return make_arithmetic(config, rewards)
        if isinstance(config, ReasoningGymTask):
            return make_reasoning_gym(config, rewards)
        return make_file_task(config, rewards)
    except BaseException:
        rewards.close()
        raise


def _build_rewards(config: TaskConfig) -> RewardSum:
    gym_options = {config.dataset: dict(config.options)} if isinstance(config, ReasoningGymTask) else {}
    weighted = [WeightedReward(make_reward(entry.name, gym_options), entry.weight) for entry in config.rewards]
    task_key = config.task_key if isinstance(config, FileTask) else None
    listed = {entry.name for entry in config.rewards}
    per_row = [make_reward(name) for name in BUILT_IN if name not in listed] if task_key is not None else []
    return RewardSum(weighted, per_row, task_key)


@dataclass(frozen=True, slots=True)
class GoldProof:
    """How many problems' own gold completions scored full marks, and how many have no reference answer or whose
    reward does not say what is correct: nothing is proved about those."""

    num_proved: int
    num_unproved: int

    def __str__(self) -> str:
        if not self.num_unproved:
            return f"gold answers score full marks: {self.num_proved} of {self.num_proved} problems"
        return (
            f"gold answers score full marks: {self.num_proved} of {self.num_proved + self.num_unproved} problems; "
            f"{self.num_unproved} could not be judged (no reference answer, or a reward without a notion of correct)"
        )


def prove_gold(task: Task, num_problems: int = 32, say: Callable[[str], None] | None = None) -> GoldProof:
    """Score the gold completions of the first ``num_problems`` of each split (all, if it has fewer).

    ``say`` is told what is about to run before it runs, so that a grader that hangs is known by name. Raises TaskError
    naming each problem whose gold is not correct or whose grader failed: training on such a task would teach noise.
    """
    splits: tuple[Literal["train", "heldout"], ...] = ("train", "heldout")
    problems = [task.problem(split, i) for split in splits for i in range(min(num_problems, task.num_problems(split)))]
    texts = []
    num_without = 0
    judged: list[Problem] = []
    for problem in problems:
        if problem.answer is None:
            num_without += 1
            continue
        judged.append(problem)
        texts.append(task.gold(problem))
    if say is not None and judged:
        say(f"proving {len(judged)} gold answers {_graders(task, judged)}")
    scores = task.score(judged, texts, [True] * len(judged))
    faults = [
        f"  {problem.problem_id}: gold {text[:100]!r} {fault}"
        for problem, text, score in zip(judged, texts, scores, strict=True)
        if (fault := _fault(score)) is not None
    ]
    if faults:
        more = f"\n  … and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise TaskError(
            f"task {task.name!r}: {len(faults)} of {len(judged)} gold answers do not score full marks:\n"
            + "\n".join(faults[:5])
            + more
            + (_WAY_OUT if any(score.error is None and score.correct is False for score in scores) else "")
        )
    num_proved = sum(score.correct is True for score in scores)
    return GoldProof(num_proved, len(problems) - num_proved)


def _graders(task: Task, problems: Seq[Problem]) -> str:
    """With what the problems are judged, as far as the task tells."""
    if not isinstance(task, ListedTask):
        return f"of task {task.name!r}"
    names = task.reward_names(problems)
    return f"with reward{'s' if len(names) > 1 else ''} {', '.join(names)}"


_WAY_OUT = (
    "\nCorrect the data or the reward. A plain number is correct from 1.0 on; a reward that grades and has no notion "
    "of right and wrong returns Score(reward, correct=None)"
)


def _fault(score: Score) -> str | None:
    if score.error is not None:
        return f"could not be graded: {score.error}"
    if score.correct is False:
        return f"is judged wrong (reward {score.reward}, parts {score.parts})"
    return None
