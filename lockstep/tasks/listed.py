"""A task over two lists of problems: the order of the problems, and their rewards. All built-in tasks are one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Literal

import numpy as np

from lockstep.records import IntArray, Problem, Score
from lockstep.tasks.errors import TaskError
from lockstep.tasks.rewards import RewardSum

Split = Literal["train", "heldout"]


@lru_cache(maxsize=8)
def epoch_order(num_problems: int, seed: int, epoch: int) -> IntArray:
    """The order of training problems in one epoch: a function of its arguments only, so that a cursor resumes it."""
    return np.random.default_rng([seed, epoch, 0x7A5C]).permutation(num_problems).astype(np.int32)


class ListedTask:
    """Problems from two lists. Training wraps around in an order drawn anew for each epoch; held-out keeps its order.

    Raises TaskError for an empty list or a problem id that occurs twice in a split.
    """

    def __init__(self, name: str, train: Seq[Problem], heldout: Seq[Problem], rewards: RewardSum, seed: int) -> None:
        self.name = name
        self._problems: dict[Split, tuple[Problem, ...]] = {"train": tuple(train), "heldout": tuple(heldout)}
        self._rewards = rewards
        self._seed = seed
        for split, problems in self._problems.items():
            if not problems:
                raise TaskError(f"task {name!r} has no {split} problem")
            if len({problem.problem_id for problem in problems}) != len(problems):
                raise TaskError(f"task {name!r}: problem ids of split {split} are not unique")

    def num_problems(self, split: Split) -> int:
        """Problems of one epoch."""
        return len(self._problems[split])

    def problem(self, split: Split, index: int) -> Problem:
        """Problem number ``index`` of an endless series; index 0 begins epoch 0."""
        if index < 0:
            raise IndexError(f"problem index must not be negative: {index}")
        problems = self._problems[split]
        epoch, position = divmod(index, len(problems))
        return problems[epoch_order(len(problems), self._seed, epoch)[position] if split == "train" else position]

    def score(self, problems: Seq[Problem], texts: Seq[str], stopped: Seq[bool]) -> list[Score]:
        """Scores of completions, in order; see ``RewardSum``."""
        return self._rewards.score(problems, texts, stopped)

    def gold(self, problem: Problem) -> str:
        """A completion that scores full marks. Raises TaskError where the problem has no reference answer."""
        text = self._rewards.gold(problem)
        if text is None:
            raise TaskError(f"problem {problem.problem_id} has no reference answer, and so no gold completion")
        return text

    def reward_names(self, problems: Seq[Problem]) -> tuple[str, ...]:
        """Names of the rewards that judge these problems, each once."""
        return self._rewards.names(problems)

    def close(self) -> None:
        """End the graders' processes."""
        self._rewards.close()
