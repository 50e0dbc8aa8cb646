"""Generated arithmetic: every (a, b, operation) is either for training or held out, fixed by the seed."""

from __future__ import annotations

import string

import numpy as np

from lockstep.config.schema import ArithmeticTask
from lockstep.records import Problem
from lockstep.tasks.errors import TaskError
from lockstep.tasks.listed import ListedTask
from lockstep.tasks.rewards import RewardSum

_COMPUTE = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def make_arithmetic(config: ArithmeticTask, rewards: RewardSum) -> ListedTask:
    """The task. 3 + 5 and 5 + 3 are two problems. Raises TaskError for a template or a size that can't work.

    Example: operands 1 to 20 with "+" are 400 problems; 64 held out leave 336 to train on.
    """
    _check_template(config)
    if config.min_operand > config.max_operand:
        raise TaskError(f"task.min_operand {config.min_operand} is above task.max_operand {config.max_operand}")
    if len(set(config.operations)) != len(config.operations) or not config.operations:
        raise TaskError(f"task.operations must be at least one, each once: {config.operations}")
    operands = range(config.min_operand, config.max_operand + 1)
    problems = [_problem(config, a, op, b) for op in config.operations for a in operands for b in operands]
    if config.num_heldout >= len(problems):
        raise TaskError(
            f"task.num_heldout {config.num_heldout} leaves nothing to train on: operands {config.min_operand} to "
            f"{config.max_operand} with {len(config.operations)} operation(s) are {len(problems)} problems"
        )
    order = np.random.default_rng([config.seed, 0xA217]).permutation(len(problems))
    heldout = [problems[i] for i in order[: config.num_heldout]]
    train = [problems[i] for i in sorted(order[config.num_heldout :])]
    return ListedTask("arithmetic", train, heldout, rewards, config.seed)


def _problem(config: ArithmeticTask, a: int, op: str, b: int) -> Problem:
    return Problem(
        problem_id=f"arithmetic/{a}{op}{b}",
        prompt=config.template.format(a=a, b=b, op=op),
        answer=str(_COMPUTE[op](a, b)),
        row={"a": a, "b": b, "op": op, "stop_bonus": config.stop_bonus},
    )


def _check_template(config: ArithmeticTask) -> None:
    """The template must name both operands, the operation if there are several, and nothing else."""
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(config.template) if name is not None}
        config.template.format(a=0, b=0, op="+")
    except (ValueError, KeyError, IndexError) as error:
        raise TaskError(f"task.template {config.template!r} can't be filled in: {error!r}") from error
    needed = {"a", "b"} | ({"op"} if len(config.operations) > 1 else set())
    if missing := needed - fields:
        raise TaskError(f"task.template {config.template!r} lacks {sorted(missing)}; it must hold {sorted(needed)}")
