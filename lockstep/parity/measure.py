"""From the records of a step to an ``Agreement``.

The trainer's log-probs come from the training forward itself (``StepOutput.logprobs``), the engine's from the rollouts,
the mask from ``Sequence.loss_mask``: before truncation policy and rejections, so that a correction can't hide the
mismatch that it corrects. Index t of both belongs to token t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from lockstep.agreement import Agreement, TokenPair, measure
from lockstep.interfaces import LogProbs
from lockstep.records import FloatArray, Rollout, RouteArray, Sequence, TrainSequence, signed_routes


def judgeable(
    logprobs: Mapping[str, FloatArray], rollouts: Seq[Rollout]
) -> tuple[list[Rollout], dict[str, FloatArray]]:
    """What ``measure_step`` can take of a batch of which the trainer has seen a part, and the log-probs for it.

    Rollouts that it has seen are whole. Of the others remain the tokens whose log-prob is not finite on the engine's
    side, with NaN for the trainer's (not computed): whatever the trainer would say, they fail.
    """
    found, known = [], dict(logprobs)
    for rollout in rollouts:
        if all(sequence.sequence_id in logprobs for sequence in rollout.sequences):
            found.append(rollout)
            continue
        broken = [replace(s, loss_mask=s.loss_mask & ~np.isfinite(s.logprobs)) for s in rollout.sequences]
        if any(sequence.loss_mask.any() for sequence in broken):
            found.append(replace(rollout, sequences=tuple(broken)))
            known |= {s.sequence_id: np.full(len(s.tokens), np.nan, dtype=np.float32) for s in broken}
    return found, known


def measure_step(
    logprobs: Mapping[str, FloatArray],
    rollouts: Seq[Rollout],
    version: int,
    *,
    items: Seq[TrainSequence] | None = None,
    train_routes: Mapping[str, RouteArray] | None = None,
) -> Agreement:
    """Agreement of one rollout batch.

    ``logprobs`` [T] by ``sequence_id``: of the training forward. ``version``: the trainer's at that forward; tokens
    sampled, or attending to a cache, at another version are stale. ``items``: what was trained on, to count the tokens
    that truncation policy and rejections dropped. ``train_routes`` [T-1, L, K] by ``sequence_id``: experts that the
    trainer's routers chose, compared with the engine's where a sequence carries them. ``worst.row`` counts the
    sequences of ``rollouts`` in order.

    Raises ValueError if log-probs of a sampled sequence are missing or of the wrong length.
    """
    pairs = [(rollout, sequence) for rollout in rollouts for sequence in rollout.sequences]
    sequences = [sequence for _, sequence in pairs]
    rejected = None
    if items is not None:
        trained = {item.sequence.sequence_id: item.loss_mask for item in items}
        rejected = [s.loss_mask & ~trained.get(s.sequence_id, np.zeros_like(s.loss_mask)) for s in sequences]
    routes = _route_pairs(train_routes or {}, sequences)
    return measure(
        [_of(logprobs, sequence) for sequence in sequences],
        [s.logprobs for s in sequences],
        [s.loss_mask for s in sequences],
        rollout_ids=[rollout.rollout_id for rollout, _ in pairs],
        replicas=[rollout.replica for rollout, _ in pairs],
        versions=[s.versions for s in sequences],
        kv_versions=[s.kv_versions for s in sequences],
        version=version,
        rejected=rejected,
        train_routes=None if routes is None else routes[0],
        rollout_routes=None if routes is None else routes[1],
    )


def measure_scores(
    train: Mapping[str, LogProbs],
    engine: Mapping[str, LogProbs],
    sequences: Seq[Sequence],
    rollout_ids: Seq[str] | None = None,
) -> Agreement:
    """Agreement of ``Trainer.logprobs`` and ``Engine.score`` on the sampled tokens of given sequences, of which several
    may belong to one of ``rollout_ids`` (None: each is a rollout).

    Also argmax and expert agreement where both sides report them for every sequence. Sequences scored at different
    versions are stale.

    Raises ValueError if a sequence is missing on one side, or the trainer's results are of several versions.
    """
    trained = {s.sequence_id: train[s.sequence_id] for s in sequences if s.sequence_id in train}
    scored = {s.sequence_id: engine[s.sequence_id] for s in sequences if s.sequence_id in engine}
    both = [(trained.get(s.sequence_id), scored.get(s.sequence_id)) for s in sequences]
    for sequence, (ours, theirs) in zip(sequences, both, strict=True):
        if ours is None or theirs is None:
            raise ValueError(
                f"sequence {sequence.sequence_id} was not scored by the {'trainer' if ours is None else 'engine'}"
            )
    ours, theirs = [a for a, _ in both if a is not None], [b for _, b in both if b is not None]
    versions = {a.version for a in ours}
    if len(versions) > 1:
        raise ValueError(f"the trainer's log-probs are of several versions: {sorted(versions)}")
    tops = [[r.top1 for r in side if r.top1 is not None] for side in (ours, theirs)]
    routes = [[_at_token(r.routes) for r in side if r.routes is not None] for side in (ours, theirs)]
    has_tops = len(tops[0]) == len(tops[1]) == len(sequences) > 0
    has_routes = len(routes[0]) == len(routes[1]) == len(sequences) > 0
    return measure(
        [a.logprobs for a in ours],
        [b.logprobs for b in theirs],
        [s.loss_mask for s in sequences],
        rollout_ids=rollout_ids,
        versions=[np.full(len(b.logprobs), b.version) for b in theirs],
        version=versions.pop() if versions else 0,
        train_top1=tops[0] if has_tops else None,
        rollout_top1=tops[1] if has_tops else None,
        train_routes=routes[0] if has_routes else None,
        rollout_routes=routes[1] if has_routes else None,
    )


def token_context(
    rollouts: Seq[Rollout], decode: Callable[[Seq[int]], str] | None = None, width: int = 8
) -> Callable[[TokenPair], str]:
    """A function that describes a token of ``measure_step``'s result: its sequence, place, ids and, with ``decode``,
    the text of up to ``width`` tokens before it and of the token itself."""
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]

    def describe(pair: TokenPair) -> str:
        sequence = sequences[pair.row]
        token = int(sequence.tokens[pair.column])
        text = f"sequence {sequence.sequence_id}, token {pair.column} (id {token})"
        if decode is not None:
            before = sequence.tokens[max(0, pair.column - width) : pair.column].tolist()
            text += f" {decode([token])!r} after {decode(before)!r}"
        return text

    return describe


def _of(logprobs: Mapping[str, FloatArray], sequence: Sequence) -> FloatArray:
    values = logprobs.get(sequence.sequence_id)
    if values is None:
        if not sequence.loss_mask.any():  # nothing was sampled, so nothing had to be computed
            return np.full(len(sequence.tokens), np.nan, dtype=np.float32)
        raise ValueError(f"the trainer returned no log-probs for sequence {sequence.sequence_id}")
    if len(values) != len(sequence.tokens):
        raise ValueError(
            f"sequence {sequence.sequence_id}: {len(values)} trainer log-probs for {len(sequence.tokens)} tokens"
        )
    return values


def _route_pairs(
    train: Mapping[str, RouteArray], sequences: Seq[Sequence]
) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Both sides' expert ids [T, L, K] of every sequence, -1 where a side has none; None if no sequence has both."""
    shapes = {s.routes.shape[1:] for s in sequences if s.routes is not None and s.sequence_id in train}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"expert ids of sequences differ in layers or experts per token: {sorted(shapes)}")
    shape = shapes.pop()

    def side(sequence: Sequence, routes: np.ndarray | None) -> np.ndarray:
        if routes is None:
            return np.full((len(sequence.tokens), *shape), -1, dtype=np.int32)
        if routes.shape != (len(sequence.tokens) - 1, *shape):
            expected = (len(sequence.tokens) - 1, *shape)
            raise ValueError(f"sequence {sequence.sequence_id}: expert ids {routes.shape}, expected {expected}")
        return _at_token(routes)

    return [side(s, train.get(s.sequence_id)) for s in sequences], [side(s, s.routes) for s in sequences]


def _at_token(routes: np.ndarray) -> np.ndarray:
    """[T-1, L, K] by forward position → [T, L, K] by the token whose log-prob that forward gave (−1 at token 0)."""
    signed = signed_routes(routes)
    return np.concatenate([np.full((1, *signed.shape[1:]), -1, dtype=signed.dtype), signed])
