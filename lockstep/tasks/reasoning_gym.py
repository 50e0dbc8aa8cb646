"""Any reasoning-gym dataset by name (https://github.com/open-thought/reasoning-gym).

The question is followed by a request for an answer tag, and the answer is extracted before it is scored: the dataset's
own scorer compares whole strings, so that "the answer is 3" would earn a part of the mark for "3". Items whose own
reference answer does not score full marks are left out and counted; too many of them refuse the dataset.
"""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from typing import Any

from lockstep.config.schema import ReasoningGymTask
from lockstep.records import Problem
from lockstep.tasks.errors import TaskError
from lockstep.tasks.grader_pool import child_environment
from lockstep.tasks.listed import ListedTask
from lockstep.tasks.rewards import RewardSum

ANSWER_REQUEST = "\n\nGive the final answer between <answer> and </answer>."
"""Appended to every question."""

_log = logging.getLogger(__name__)


def make_reasoning_gym(config: ReasoningGymTask, rewards: RewardSum) -> ListedTask:
    """The task: all items are made now, in a child process. Held-out questions never occur in training.

    Raises TaskError for an unknown dataset, options that it refuses, a dataset whose own answers fail, or one with too
    few different questions.
    """
    if taken := {"seed", "size"} & set(config.options):
        raise TaskError(f"task.options must not set {sorted(taken)}: task.seed, num_train and num_heldout do")
    items = _make_items(config)
    if items["rejected"]:
        _log.warning(
            "reasoning-gym %s: left out %d item(s) whose own answer does not score full marks; first: %s",
            config.dataset, len(items["rejected"]), items["rejected"][0],
        )  # fmt: skip
    if len(items["train"]) < config.num_train:
        _log.warning(
            "reasoning-gym %s: %d training items instead of %d: the others repeat held-out questions or failed",
            config.dataset, len(items["train"]), config.num_train,
        )  # fmt: skip
    train = [_problem(config.dataset, *item) for item in items["train"]]
    heldout = [_problem(config.dataset, *item) for item in items["heldout"]]
    return ListedTask(f"reasoning_gym/{config.dataset}", train, heldout, rewards, config.seed)


def _problem(dataset: str, index: int, entry: dict[str, Any], gold: str) -> Problem:
    return Problem(
        problem_id=f"reasoning_gym/{dataset}/{index}",
        prompt=entry["question"] + ANSWER_REQUEST,
        answer=gold,
        row={**entry, "dataset": dataset},
    )


def _make_items(config: ReasoningGymTask) -> dict[str, Any]:
    arguments = {
        "name": config.dataset,
        "options": config.options,
        "seed": config.seed,
        "num_train": config.num_train,
        "num_heldout": config.num_heldout,
    }
    child = subprocess.run(
        [sys.executable, "-m", "lockstep.tasks.gym_items"],
        input=pickle.dumps(arguments),
        capture_output=True,
        env=child_environment(),
        check=False,
    )
    if child.returncode != 0:
        last_words = child.stderr.decode(errors="replace").strip()[-1000:]
        raise TaskError(f"reasoning-gym dataset {config.dataset!r} could not make its items:\n{last_words}")
    items = pickle.loads(child.stdout)
    if "error" in items:
        raise TaskError(items["error"])
    return items
