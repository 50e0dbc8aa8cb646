"""Renders the prompts that a run will ask before it begins: what would be refused at hour three is refused at once."""

from __future__ import annotations

import copy
from typing import Literal

from lockstep.interfaces import Task
from lockstep.tasks.errors import TaskError
from lockstep.tasks.prompt import PromptRenderer

MAX_SHOWN = 5


def check_prompts(task: Task, renderer: PromptRenderer, *, num_train: int, num_heldout: int) -> str | None:
    """Render the first ``num_train`` training and ``num_heldout`` held-out prompts (or all, if there are fewer).

    Returns a sentence about over-long ones that will be skipped or cut; None if there are none. Counts of ``renderer``
    stay as they are. Raises TaskError naming the prompts that would be refused when their turn comes, or if every
    training prompt or every held-out one would be skipped.
    """
    probe = copy.copy(renderer)
    probe.num_skipped = probe.num_truncated = 0
    faults: list[str] = []
    num_prompts = 0
    wanted: tuple[tuple[Literal["train", "heldout"], int], ...] = (("train", num_train), ("heldout", num_heldout))
    for split, limit in wanted:
        size, skipped_before = min(limit, task.num_problems(split)), probe.num_skipped
        num_prompts += size
        for index in range(size):
            try:
                probe.render(task.problem(split, index))
            except TaskError as fault:
                faults.append(f"  {fault}")
        if size and probe.num_skipped - skipped_before == size:
            raise TaskError(
                f"all {size} {split} prompts of task {task.name!r} that the run would ask are longer than "
                f"prompt.max_tokens {probe.config.max_tokens} and would be skipped; raise it, or set prompt.overlong"
            )
    if faults:
        more = f"\n  … and {len(faults) - MAX_SHOWN} more" if len(faults) > MAX_SHOWN else ""
        raise TaskError(
            f"task {task.name!r}: {len(faults)} of {num_prompts} prompts can't be asked:\n"
            + "\n".join(faults[:MAX_SHOWN])
            + more
        )
    kinds = {"skipped": probe.num_skipped, "cut at the left": probe.num_truncated}
    told = [f"{count} will be {what}" for what, count in kinds.items() if count]
    if not told:
        return None
    return f"of {num_prompts} prompts, {told[0]}: they are longer than prompt.max_tokens {probe.config.max_tokens}"
