"""Log-probs of given tokens by vLLM: in one prefill, or decoded token by token over its cache.

By prefill they are vLLM's prompt log-probs. Those skip the temperature, so the logits are divided by it before
(``LogitRule``): nothing else may run meanwhile unless the temperature is 1. By decode the answer is forced, by
``SamplingParams.trace_decode_token_ids`` where vLLM has trace replay (model runner V2), else by ``ForcedTokens``: vLLM
samples, its choice is replaced, and the log-prob is that of the sampling distribution.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Literal

import numpy as np

from lockstep.interfaces import LogProbs
from lockstep.records import RouteArray, Sequence
from lockstep.rollout.vllm_hooks import ForcedTokens, LogitRule
from lockstep.rollout.vllm_scheduler import VllmScheduler


class VllmScorer:
    """Scores sequences through a scheduler's engine. ``forced`` None: trace replay."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        rule: LogitRule,
        forced: ForcedTokens | None,
        *,
        temperature: float,
        want_routes: bool,
    ) -> None:
        self._scheduler, self._rule, self._forced = scheduler, rule, forced
        self._temperature, self._want_routes = temperature, want_routes

    def score(self, sequences: Seq[Sequence], path: Literal["prefill", "decode"]) -> dict[str, LogProbs]:
        """See ``interfaces.Engine.score``. Raises RuntimeError where requests in flight would be disturbed."""
        tables = {one.sequence_id: _blank(len(one.tokens)) for one in sequences}
        starts = {one.sequence_id: len(one.tokens) if path == "prefill" else _first_counted(one) for one in sequences}
        by_prefill = [one for one in sequences if starts[one.sequence_id] > 1]
        routes = self._prompts(by_prefill, starts, tables)
        if path == "decode":
            decoded = [one for one in sequences if starts[one.sequence_id] < len(one.tokens)]
            routes |= self._answers(decoded, starts, tables)
        if any(np.isnan(logprobs[1:]).any() for logprobs, _ in tables.values()):
            self._scheduler.note_not_finite()
        version = self._scheduler.version
        return {
            one.sequence_id: LogProbs(
                tables[one.sequence_id][0], version, _cut(routes.get(one.sequence_id), one), tables[one.sequence_id][1]
            )
            for one in sequences
        }

    def _prompts(self, sequences: Seq[Sequence], ends: dict[str, int], tables: dict[str, _Table]) -> _Routes:
        """Fill in tokens 1 to the sequence's end (exclusive) from one prefill."""
        if not sequences:
            return {}
        if self._temperature != 1.0 and self._scheduler.started:
            raise RuntimeError(
                f"{self._scheduler.started} requests are in flight: scoring prompts at temperature "
                f"{self._temperature} would change their logits; wait for them, or abort them"
            )
        params = [self._scheduler.scoring_params(temperature=0.0, max_tokens=1, prompt_logprobs=1) for _ in sequences]
        prompts = [one.tokens[: ends[one.sequence_id]].tolist() for one in sequences]
        self._rule.temperature = self._temperature
        try:
            results = self._scheduler.run(prompts, params, want_routes=self._want_routes)
        finally:
            self._rule.temperature = 1.0
        routes: _Routes = {}
        for one, (output, found) in zip(sequences, results, strict=True):
            end = ends[one.sequence_id]
            _fill(tables[one.sequence_id], 1, one.tokens[1:end], output.prompt_logprobs[1:end])
            routes[one.sequence_id] = found
        return routes

    def _answers(self, sequences: Seq[Sequence], starts: dict[str, int], tables: dict[str, _Table]) -> _Routes:
        """Fill in the tokens from the sequence's start on by forced decoding."""
        answers = [one.tokens[starts[one.sequence_id] :].tolist() for one in sequences]
        trace = [{"trace_decode_token_ids": answer} if self._forced is None else {} for answer in answers]
        params = [
            self._scheduler.scoring_params(
                temperature=self._temperature, max_tokens=len(answer), logprobs=1, seed=0, **more
            )
            for answer, more in zip(answers, trace, strict=True)
        ]
        prompts = [one.tokens[: starts[one.sequence_id]].tolist() for one in sequences]
        internal: list[str] = []

        def force(index: int, request_id: str) -> None:
            internal.append(request_id)
            if self._forced is not None:
                self._forced.by_request[request_id] = answers[index]

        try:
            results = self._scheduler.run(prompts, params, want_routes=self._want_routes, on_start=force)
        finally:
            if self._forced is not None:
                for request_id in internal:
                    self._forced.by_request.pop(request_id, None)
        routes: _Routes = {}
        for one, answer, (output, found) in zip(sequences, answers, results, strict=True):
            piece = output.outputs[0]
            if list(piece.token_ids) != answer:
                raise RuntimeError(f"sequence {one.sequence_id}: vLLM did not decode the given tokens")
            start = starts[one.sequence_id]
            _fill(tables[one.sequence_id], start, one.tokens[start:], piece.logprobs)
            routes[one.sequence_id] = found
        return routes


_Table = tuple[np.ndarray, np.ndarray]
_Routes = dict[str, RouteArray | None]


def _fill(table: _Table, start: int, tokens: np.ndarray, found: Seq[dict[int, Any]]) -> None:
    """Log-probs and argmax ids of ``tokens`` from vLLM's tables (the token itself, then the likeliest)."""
    logprobs, top1 = table
    for position, (token, entries) in enumerate(zip(tokens.tolist(), found, strict=True), start):
        logprobs[position] = entries[token].logprob
        top1[position] = next(reversed(entries))


def _cut(routes: RouteArray | None, sequence: Sequence) -> RouteArray | None:
    """The ids of the positions that predict a token: a prefill computes the last one as well."""
    return None if routes is None else routes[: len(sequence.tokens) - 1]


def _first_counted(sequence: Sequence) -> int:
    counted = np.flatnonzero(sequence.loss_mask)
    return int(counted[0]) if len(counted) else 1


def _blank(length: int) -> _Table:
    logprobs, top1 = np.full(length, np.nan, dtype=np.float32), np.full(length, -1, dtype=np.int32)
    return logprobs, top1
