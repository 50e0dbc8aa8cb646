"""The reasoning-gym side of the reasoning-gym task; runs in child processes only.

Items are made in a process of their own with a fixed hash seed, because several datasets iterate over sets of strings
(isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note, word_ladder in 0.1.25: other items in every
process otherwise), and with seeded global generators, because list_functions draws from them.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import pickle
import random
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

GOLD_FROM_METADATA: dict[str, Callable[[dict[str, Any]], str]] = {
    "graph_color": lambda metadata: json.dumps({str(k): v for k, v in metadata["possible_answer"].items()}),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
"""Datasets whose ``answer`` is None because many answers are right, and where an example of one is kept."""

NO_GOLD = {
    "boxnet": "upstream makes no reference plan",
    "rush_hour": "upstream makes no reference solution",
}
"""Datasets of reasoning-gym 0.1.25 without any reference answer: nothing can prove that their grader works."""

_EVALS_ANSWERS = (
    "reasoning_gym.algorithmic.binary_matrix",
    "reasoning_gym.algorithmic.spiral_matrix",
    "reasoning_gym.algorithmic.string_insertion",
    "reasoning_gym.games.n_queens",
)
"""Modules of reasoning-gym 0.1.25 that call ``eval`` on the model's answer."""

MAX_REJECTED_SHARE = 0.2
"""Above this share of items whose own answer does not score full marks, the dataset is refused."""


def harden() -> None:
    """Let upstream graders that call ``eval`` on the model's answer read literals only. For processes that score."""
    for name in _EVALS_ANSWERS:
        vars(sys.modules[name])["eval"] = ast.literal_eval


def create(name: str, options: dict[str, Any]) -> ProceduralDataset:
    """The dataset, or ValueError with the nearest name or what its configuration refused."""
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"nearest: {', '.join(near)}" if near else "its README lists all names"
        raise ValueError(f"reasoning-gym {reasoning_gym.__version__} has no dataset {name!r}; {hint}")
    try:
        if name == "composite":
            specs = [DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in options.get("datasets", [])]
            return reasoning_gym.create_dataset(name, **{**options, "datasets": specs})
        return reasoning_gym.create_dataset(name, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym dataset {name!r} refuses its options {options}: {error}") from error


@lru_cache(maxsize=256)
def _scorer(name: str, options_json: str) -> ProceduralDataset:
    return create(name, json.loads(options_json))


def score(name: str, options: dict[str, Any], answer: str, entry: dict[str, Any]) -> float:
    """The dataset's own score of an extracted answer, 0 to 1. Raises what the dataset raises."""
    return float(_scorer(name, json.dumps(options, sort_keys=True)).score_answer(answer, entry))


def gold_answer(entry: dict[str, Any]) -> str | None:
    """An answer that should score full marks; None if upstream has none."""
    source = entry["metadata"].get("source_dataset")
    if entry["answer"] is None and source in GOLD_FROM_METADATA:
        return GOLD_FROM_METADATA[source](entry["metadata"])
    return entry["answer"] if entry["answer"] is None else str(entry["answer"])


def make_items(name: str, options: dict[str, Any], seed: int, num_train: int, num_heldout: int) -> dict[str, Any]:
    """Held-out and training items ``(index, entry, gold)`` with different questions, and how many were rejected.

    An item is rejected when its own answer does not score full marks. Training may get fewer items than asked where
    the dataset has not enough different questions. Raises ValueError where nothing useful can be made.
    """
    if name in NO_GOLD:
        raise ValueError(
            f"reasoning-gym dataset {name!r} can't be used: {NO_GOLD[name]}, so nothing can prove that its grader works"
        )
    wanted = num_heldout + num_train
    num_tries = wanted + wanted // 4 + 16
    dataset = create(name, {**options, "seed": seed, "size": num_tries})
    heldout: dict[str, tuple[int, dict[str, Any], str]] = {}
    train: list[tuple[int, dict[str, Any], str]] = []
    rejected: list[str] = []
    num_seen = 0
    for index in range(num_tries):
        if len(train) == num_train:
            break
        random.seed(f"{seed}/{index}")
        np.random.seed((seed * 1_000_003 + index) % 2**32)
        entry = dataset[index]
        num_seen += 1
        gold = gold_answer(entry)
        mark = dataset.score_answer(gold.strip(), entry) if gold is not None else 0.0
        if gold is None or mark < 1.0:
            rejected.append(f"item {index}: {gold!r} scores {mark}")
        elif len(heldout) < num_heldout:
            heldout.setdefault(entry["question"], (index, entry, gold))
        elif entry["question"] not in heldout:
            train.append((index, entry, gold))
    if len(rejected) > MAX_REJECTED_SHARE * num_seen:
        raise ValueError(
            f"reasoning-gym dataset {name!r}: the reference answers of {len(rejected)} of {num_seen} items do not "
            f"score full marks with its own grader; first: {rejected[0][:300]}"
        )
    if len(heldout) < num_heldout or not train:
        num_different = len(heldout) + len({entry["question"] for _, entry, _ in train})
        raise ValueError(
            f"reasoning-gym dataset {name!r} with options {options}: {num_seen} items hold only {num_different} "
            f"different questions; {num_heldout} are to be held out and at least 1 trained on. Lower num_heldout or "
            "widen the options"
        )
    return {"heldout": list(heldout.values()), "train": train, "rejected": rejected}


def main() -> None:
    """Child process: keyword arguments of ``make_items`` pickled on stdin, its result pickled on stdout."""
    replies = os.dup(1)
    os.dup2(2, 1)  # some datasets print while they make items
    arguments = pickle.load(sys.stdin.buffer)
    try:
        result = make_items(**arguments)
    except ValueError as error:
        result = {"error": str(error)}
    with os.fdopen(replies, "wb") as stream:
        pickle.dump(result, stream)


if __name__ == "__main__":
    main()
