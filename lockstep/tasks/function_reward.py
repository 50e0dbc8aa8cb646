"""A reward from a plain function, most often a user's: whatever it does, it spoils no more than its own score.

What it raises, and what it returns that is no reward, becomes that one score's error. A function that hangs can't be
stopped from here, but it is named.
"""

from __future__ import annotations

import logging
import math
import threading
import traceback
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real

import numpy as np

from lockstep.records import Problem, Score

RewardFunction = Callable[[Problem, str, bool], "float | Score | None"]
"""``fn(problem, completion, stopped)``; ``stopped`` is False where the completion was cut by its length limit."""

MAX_REWARD = 1e9
"""Largest size of a reward. The standard deviation of a group squares them, and float32 ends at 3e38."""

SLOW_S = 60.0
"""Seconds after which a call that is still scoring is named in the log."""

_log = logging.getLogger(__name__)


def size_fault(reward: float) -> str | None:
    """Why a number can't be a reward; None if it can."""
    if not math.isfinite(reward):
        return f"{reward}; a reward must be finite"
    if abs(reward) > MAX_REWARD:
        return f"{reward:g}; a reward must lie within ±{MAX_REWARD:g}, scale it down"
    return None


def said(error: BaseException) -> str:
    """An exception's type and text in one line or more; also that of one whose ``str`` fails."""
    return "".join(traceback.format_exception_only(error)).strip()


class FunctionReward:
    """A reward from a plain function. What it raises becomes the error of that one score, SystemExit too: a grader's
    ``sys.exit()`` would end the run as if it had succeeded. Only KeyboardInterrupt passes, which is the person's."""

    def __init__(self, name: str, function: RewardFunction) -> None:
        self.name = name
        self._function = function

    def score(self, problems: Seq[Problem], texts: Seq[str], stopped: Seq[bool]) -> list[Score]:
        """Scores in order. Warns once if they take more than ``SLOW_S`` seconds together."""
        scores: list[Score] = []
        with _named_when_slow(self.name, problems, scores):
            for sample in zip(problems, texts, stopped, strict=True):
                scores.append(self._one(*sample))  # noqa: PERF401  one by one: the timer reads how far it is
        return scores

    def _one(self, problem: Problem, text: str, stopped: bool) -> Score:
        try:
            return _as_score(self._function(problem, text, stopped))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return Score(None, error=said(error))

    def gold(self, problem: Problem) -> str | None:
        """The reference answer itself."""
        return problem.answer

    def close(self) -> None:
        """Nothing to end."""


def _as_score(value: object) -> Score:
    """What a function returned, with Python's own numbers; a ``Score`` with an error where it is no reward."""
    if value is None:
        return Score(None)
    plain = _plain(value.reward if isinstance(value, Score) else value)
    if isinstance(value, Score):
        for name in ("correct", "formatted"):
            flag = _plain(getattr(value, name))
            if flag not in (None, True, False):  # 0.3 and "no" would count as right
                return Score(None, error=f"returned a Score whose {name} is {flag!r}; True, False or None is right")
        if plain is None:
            return replace(value, correct=_flag(value.correct), formatted=_flag(value.formatted))
    if not isinstance(plain, Real):
        inside = "a Score whose reward is " if isinstance(value, Score) else ""
        return Score(None, error=f"returned {inside}{type(plain).__name__}; a number, a Score or None is right")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if fault := size_fault(number):
        return Score(None, error=f"returned {fault}")
    if isinstance(value, Score):
        return replace(value, reward=number, correct=_flag(value.correct), formatted=_flag(value.formatted))
    return Score(number, correct=number >= 1.0)


def _plain(value: object) -> object:
    """numpy's scalars as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _flag(value: object) -> bool | None:
    """``correct`` and ``formatted`` are compared by identity elsewhere, which ``numpy.True_`` would fail."""
    return None if value is None else bool(value)


@contextmanager
def _named_when_slow(name: str, problems: Seq[Problem], scores: Seq[Score]) -> Iterator[None]:
    """Log a warning from another thread if the block takes more than ``SLOW_S``; ``scores`` grows as it goes on."""

    def warn() -> None:
        done = len(scores)
        if done < len(problems):
            _log.warning(
                "reward %s has been scoring for %g s: %d of %d completions are done, the next is of problem %s. A "
                "function that hangs holds up the run; interrupt it, or give the function a time limit of its own",
                name, SLOW_S, done, len(problems), problems[done].problem_id,
            )  # fmt: skip

    timer = threading.Timer(SLOW_S, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
