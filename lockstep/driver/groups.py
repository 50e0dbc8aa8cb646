"""From prompts to scored rollouts: what one step trains on.

Everything is a function of (run seed, step, cursor): the problem order belongs to the task, each sample's random stream
to its rollout id. So a resumed run samples what the uninterrupted one would have, with nothing but a cursor saved.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lockstep.config.schema import AlgorithmConfig, RolloutConfig
from lockstep.interfaces import Engine, Task
from lockstep.records import (
    NOT_SAMPLED,
    Completion,
    GenerateRequest,
    IntArray,
    Problem,
    Rollout,
    RolloutStatus,
    SamplingParams,
    Score,
    Sequence,
)
from lockstep.spans import span
from lockstep.tasks.prompt import PromptRenderer
from lockstep.train.advantages import informative_groups

MAX_SKIPS_IN_A_ROW = 1000


class GroupError(RuntimeError):
    """No batch could be sampled: the reason, and what would help."""


@dataclass(frozen=True, slots=True)
class SampledGroups:
    """Scored rollouts of one step in prompt order, the cursor after them, and counts for the metrics."""

    rollouts: tuple[Rollout, ...]
    cursor: int
    num_dropped_groups: int
    num_sampled_tokens: int  # of dropped groups too
    num_unscored_groups: int = 0  # dropped ones in which no sample has a reward
    dropped_scores: tuple[Score, ...] = ()  # of the samples of dropped groups

    @property
    def scores(self) -> list[Score]:
        """Of every sample of the step, dropped groups too."""
        return [*(rollout.score for rollout in self.rollouts), *self.dropped_scores]


@dataclass(frozen=True, slots=True)
class _Prompt:
    group_id: str
    problem: Problem
    tokens: IntArray


class GroupSampler:
    """Samples groups of completions from an engine and scores them with a task."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        renderer: PromptRenderer,
        decode: Callable[[Seq[int]], str],
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        *,
        seed: int,
        stop_token_ids: tuple[int, ...],
        runner: asyncio.Runner,
    ) -> None:
        self.engine, self.task, self.renderer, self.decode = engine, task, renderer, decode
        self.algorithm, self.seed, self.runner = algorithm, seed, runner
        self.record_routes = rollout.record_routes
        self.sampling = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            stop_token_ids=stop_token_ids,
            stop_strings=rollout.stop_strings,
        )

    def sample(self, step: int, cursor: int) -> SampledGroups:
        """``num_prompts`` groups from the training problems at ``cursor`` on. With dynamic sampling, groups whose
        raw rewards are all equal are dropped and refilled in prompt order, for at most ``max_refill_rounds`` rounds.
        """
        dynamic, wanted = self.algorithm.dynamic_sampling, self.algorithm.num_prompts
        kept: list[Rollout] = []
        dropped: list[Score] = []
        num_kept = num_dropped = num_unscored = num_tokens = rounds = 0
        while True:
            prompts, cursor = self._prompts("train", cursor, wanted - num_kept, prefix=f"step-{step}")
            rollouts = self._rollouts(prompts, self.algorithm.group_size, self.sampling, phase="rollout")
            self._refuse_failures(rollouts)
            num_tokens += sum(rollout.num_sampled_tokens for rollout in rollouts)
            if not dynamic.enabled:
                return SampledGroups(tuple(rollouts), cursor, 0, num_tokens)
            keep = informative_groups(rollouts)
            num_dropped += len(prompts) - len(keep)
            scored = {rollout.group_id for rollout in rollouts if rollout.score.reward is not None}
            num_unscored += len({prompt.group_id for prompt in prompts} - scored)
            num_kept += len(keep)
            kept += [rollout for rollout in rollouts if rollout.group_id in keep]
            dropped += [rollout.score for rollout in rollouts if rollout.group_id not in keep]
            if num_kept == wanted or rounds == dynamic.max_refill_rounds:
                return SampledGroups(tuple(kept), cursor, num_dropped, num_tokens, num_unscored, tuple(dropped))
            rounds += 1

    def prompt_counts(self) -> dict[str, int]:
        """Over-long prompts that this process has skipped or cut so far."""
        return {
            "prompt/skipped_so_far": self.renderer.num_skipped,
            "prompt/truncated_so_far": self.renderer.num_truncated,
        }

    def evaluate(self, num_problems: int, step: int) -> tuple[Rollout, ...]:
        """One greedy completion of each of the first ``num_problems`` held-out problems."""
        prompts, _ = self._prompts("heldout", 0, num_problems, prefix=f"eval-{step}")
        greedy = replace(self.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        return tuple(self._rollouts(prompts, 1, greedy, phase="eval"))

    def _refuse_failures(self, rollouts: Seq[Rollout]) -> None:
        """Training on the few samples that a broken grader can score would look like success."""
        errors = [rollout.score.error for rollout in rollouts if rollout.score.error is not None]
        if len(errors) > self.algorithm.max_failed_share * len(rollouts):
            raise GroupError(
                f"{len(errors)} of {len(rollouts)} samples could not be generated or scored, more than "
                f"algorithm.max_failed_share {self.algorithm.max_failed_share:g} allows; first: {errors[0]}"
            )

    def _prompts(
        self, split: Literal["train", "heldout"], cursor: int, count: int, *, prefix: str
    ) -> tuple[list[_Prompt], int]:
        prompts: list[_Prompt] = []
        num_skipped = 0
        limit = self.task.num_problems(split) if split == "heldout" else None
        while len(prompts) < count and (limit is None or cursor < limit):
            problem = self.task.problem(split, cursor)
            rendered = self.renderer.render(problem)
            if rendered is None:
                num_skipped += 1
                if num_skipped >= MAX_SKIPS_IN_A_ROW:
                    raise GroupError(
                        f"{num_skipped} {split} prompts in a row are longer than prompt.max_tokens and were skipped; "
                        "raise prompt.max_tokens or set prompt.overlong"
                    )
            else:
                num_skipped = 0
                prompts.append(_Prompt(f"{prefix}/{cursor}", problem, rendered.tokens))
            cursor += 1
        return prompts, cursor

    def _rollouts(
        self, prompts: Seq[_Prompt], group_size: int, sampling: SamplingParams, *, phase: Literal["rollout", "eval"]
    ) -> list[Rollout]:
        """Completions with their scores. ``phase`` names the spans: a step's throughput is of its own samples, not of
        the evaluation that may follow in it."""
        members = [(prompt, f"{prompt.group_id}/{member}") for prompt in prompts for member in range(group_size)]
        requests = [
            GenerateRequest(
                rollout_id,
                prompt.tokens,
                replace(sampling, seed=stream_seed(self.seed, rollout_id)),
                want_routes=self.record_routes,
            )
            for prompt, rollout_id in members
        ]
        with span(f"{phase}/generate"):
            completions = self.runner.run(_gather(self.engine, requests))
        with span(f"{phase}/score"):
            texts = [self.decode(completion.tokens.tolist()) for completion in completions]
            scores = self._scores([prompt.problem for prompt, _ in members], texts, completions)
        return [
            Rollout(
                rollout_id=rollout_id,
                group_id=prompt.group_id,
                problem=prompt.problem,
                sequences=(sequence_of(prompt.tokens, completion),),
                text=text,
                score=score,
                status=_STATUS[completion.finish_reason],
            )
            for (prompt, rollout_id), completion, text, score in zip(members, completions, texts, scores, strict=True)
        ]

    def _scores(self, problems: Seq[Problem], texts: Seq[str], completions: Seq[Completion]) -> list[Score]:
        """Scores of whole completions; an aborted or failed one has none and leaves the baseline."""
        whole = [i for i, completion in enumerate(completions) if completion.finish_reason in ("stop", "length")]
        scored = self.task.score(
            [problems[i] for i in whole],
            [texts[i] for i in whole],
            [completions[i].finish_reason == "stop" for i in whole],
        )
        scores = [
            Score(reward=None, error=f"{completion.finish_reason}: {completion.error or 'not finished'}")
            for completion in completions
        ]
        for i, score in zip(whole, scored, strict=True):
            scores[i] = score
        return scores


_STATUS: dict[str, RolloutStatus] = {
    "stop": "finished",
    "length": "truncated",
    "aborted": "aborted",
    "failed": "failed",
}


async def _gather(engine: Engine, requests: Seq[GenerateRequest]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def stream_seed(run_seed: int, rollout_id: str) -> int:
    """Seed of one sample's random stream, 63 bits: different for every rollout, the same on every machine."""
    digest = hashlib.blake2b(f"{run_seed}/{rollout_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sequence_of(prompt: IntArray, completion: Completion) -> Sequence:
    """The training sequence of a prompt [P] and its completion [n]: token in, token out, nothing re-encoded."""
    absent = np.full(len(prompt), NOT_SAMPLED, dtype=np.int32)
    return Sequence(
        sequence_id=completion.request_id,
        tokens=np.concatenate([prompt, completion.tokens]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(len(prompt), dtype=bool), np.ones(len(completion.tokens), dtype=bool)]),
        logprobs=np.concatenate([np.zeros(len(prompt), dtype=np.float32), completion.logprobs]),
        versions=np.concatenate([absent, completion.versions]),
        kv_versions=np.concatenate([absent, completion.kv_versions]),
        routes=completion.routes,
    )
