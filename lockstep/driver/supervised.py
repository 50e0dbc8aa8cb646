"""Supervised steps on the task's gold completions, before the first rollout.

They have an optimizer of their own: the policy that reinforcement learning starts from is version 0 with fresh moments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.config.schema import RunConfig
from lockstep.interfaces import Task
from lockstep.records import NOT_SAMPLED, Batch, IntArray, Sequence, TrainSequence
from lockstep.tasks.errors import TaskError
from lockstep.tasks.prompt import PromptRenderer
from lockstep.train.fsdp import FsdpTrainer
from lockstep.train.objective import SupervisedObjective


def run_supervised(
    config: RunConfig, model: Any, task: Task, renderer: PromptRenderer, tokenizer: Any, vocab_limit: int
) -> str:
    """Train ``model`` in place for ``supervised.steps`` steps; returns a sentence with first and last loss.

    Problems are the training ones in the task's order. Raises TaskError if a prompt is skipped as overlong, because
    supervised data must not vanish silently, or if the tokenizer refuses a reference answer.
    """
    settings = config.supervised
    trainer = FsdpTrainer(
        model,
        config.trainer.model_copy(
            update={
                "learning_rate": settings.learning_rate,
                "schedule": "constant",
                "warmup_steps": 0,
                "decay_start_step": 0,
                "routing_replay": False,  # no engine has run these texts
            }
        ),
        total_optimizer_steps=settings.steps,
        temperature=1.0,
        vocab_limit=vocab_limit,
    )
    objective, losses = SupervisedObjective(), []
    for step in range(settings.steps):
        items = tuple(
            _gold_item(task, renderer, tokenizer, step * settings.batch_size + member, vocab_limit)
            for member in range(settings.batch_size)
        )
        losses.append(trainer.forward_backward(Batch(items), objective).loss)
        trainer.optim_step()
    return f"supervised: {settings.steps} steps, loss {losses[0]:.3f} → {losses[-1]:.3f}"


def _gold_item(task: Task, renderer: PromptRenderer, tokenizer: Any, index: int, vocab_limit: int) -> TrainSequence:
    problem = task.problem("train", index)
    rendered = renderer.render(problem)
    if rendered is None:
        raise TaskError(
            f"problem {problem.problem_id}: its prompt is longer than prompt.max_tokens and would be skipped, which "
            "supervised steps don't do; remove it, raise prompt.max_tokens, or set prompt.overlong = 'truncate_left'"
        )
    try:
        gold = tokenizer.encode(task.gold(problem), add_special_tokens=False)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"problem {problem.problem_id}: the tokenizer refuses its reference answer, which supervised steps train "
            f"on: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise TaskError(
            "supervised.steps: the tokenizer has no end-of-sequence token to teach; set supervised.steps = 0"
        )
    answer = [*gold, tokenizer.eos_token_id]
    if max(answer) >= vocab_limit:
        raise TaskError(
            f"problem {problem.problem_id}: token {max(answer)} of its reference answer has no row in the model's "
            f"vocabulary of {vocab_limit}: tokenizer and model don't belong together"
        )
    tokens: IntArray = np.concatenate([rendered.tokens, np.asarray(answer)]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(rendered.tokens)
    absent = np.full(len(tokens), NOT_SAMPLED, dtype=np.int32)
    sequence = Sequence(
        sequence_id=f"gold/{index}",
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        versions=absent,
        kv_versions=absent,
    )
    return TrainSequence(sequence, f"gold/{index}", mask, np.ones(len(tokens), dtype=np.float32))
