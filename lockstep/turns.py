"""The turns of an agent loop as the training sequences of one rollout, token in, token out.

::

    turn 1   [system question]                        → [think answer]     a sequence begins
    turn 2   [system question think answer | tool]    → [think answer]     extends it: same sequence, tool masked
    turn 3   [system question answer tool answer | …] → [answer]           history rewritten: a new sequence

A turn whose prompt begins with every token of an earlier sequence is appended to it. Any other turn (a template that
leaves earlier reasoning out, a window that slid, a fork) begins a new sequence, whose prompt is masked as a whole: each
sampled token is trained on once, in the context that it was sampled in, and no context is made up. Appending to the
longest sequence that fits gives the fewest sequences possible. Nothing here sees text; a loop that decodes and encodes
again changes ids, and shows as forks. Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.records import NOT_SAMPLED, Completion, FloatArray, IntArray, RouteArray, Sequence

MAX_ID = int(np.iinfo(np.int32).max)

Integers = NDArray[np.integer] | Seq[int]
Floats = NDArray[np.floating] | Seq[float]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a rollout: the ids that were sent and those that came back. Lists do as well as arrays.

    ``kv_versions`` None: nothing older than this rollout's oldest version so far was attended to, which holds for an
    engine that empties its prefix cache at each refit.
    """

    prompt_tokens: Integers  # [P]
    tokens: Integers  # [n] sampled; may be empty
    logprobs: Floats  # [n]
    versions: Integers  # [n] policy version that sampled the token
    kv_versions: Integers | None = None  # [n] oldest version in the cache that it attended to
    routes: RouteArray | None = None  # [P + n - 1, L, K] expert ids by the position that was fed

    @classmethod
    def of(cls, prompt_tokens: IntArray, completion: Completion) -> Turn:
        """A request of ours."""
        c = completion
        return cls(prompt_tokens, c.tokens, c.logprobs, c.versions, c.kv_versions, c.routes)


@dataclass(frozen=True, slots=True)
class Fork:
    """A turn (counted from 1) that extends nothing before it. Its prompt begins with ``num_common`` of the
    ``num_tokens`` tokens of the sequence nearest to it: what differs at place ``num_common`` is the reason."""

    turn: int
    num_common: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class JoinedTurns:
    """The sequences of a rollout, in the order of their last turns, and what became of its turns.

    ``num_turns`` counts those that sampled something, ``num_empty_turns`` the others, which leave no trace. What
    ``max_sequences`` cut away is in ``num_dropped_sequences`` and ``num_dropped`` (sampled tokens).
    """

    sequences: tuple[Sequence, ...]
    num_turns: int
    num_empty_turns: int = 0
    forks: tuple[Fork, ...] = ()
    num_dropped_sequences: int = 0
    num_dropped: int = 0


def join_turns(
    rollout_id: str, turns: Seq[Turn], *, vocab_size: int | None = None, max_sequences: int | None = None
) -> JoinedTurns:
    """The turns of one rollout, in the order in which they were sampled, as few sequences.

    ``max_sequences`` bounds what a loop of many forks costs: those with the most sampled tokens are kept (of equal
    ones the later), a selection biased towards long ones, and the others are counted as dropped. Their ids are
    ``rollout_id/0`` and so on.

    Raises ValueError, with rollout, turn and field, for ids that are no integers or outside of the vocabulary, arrays
    that differ in length, a prompt without a token, and expert ids of several shapes.
    """
    if max_sequences is not None and max_sequences < 1:
        raise ValueError(f"max_sequences is {max_sequences}; at least 1 is needed, or None for no bound")
    checked = [_checked(turn, f"rollout {rollout_id}, turn {i}", vocab_size) for i, turn in enumerate(turns, start=1)]
    open_sequences: list[_Open] = []
    forks: list[Fork] = []
    num_turns, oldest = 0, MAX_ID
    for number, turn in enumerate(checked, start=1):
        if not len(turn.tokens):
            continue
        num_turns += 1
        fitting = [one for one in open_sequences if _begins_with(turn.prompt, one.tokens)]
        if fitting:
            found = max(fitting, key=lambda one: len(one.tokens))
        else:
            if open_sequences:
                forks.append(_fork(number, turn.prompt, open_sequences))
            found = _Open()
            open_sequences.append(found)
        found.append(turn, number, oldest)
        oldest = min(oldest, int(turn.versions.min()))
    kept = sorted(open_sequences, key=lambda one: (-int(one.mask.sum()), -one.last_turn))[:max_sequences]
    dropped = [one for one in open_sequences if not any(one is other for other in kept)]
    kept.sort(key=lambda one: one.last_turn)
    return JoinedTurns(
        tuple(one.sequence(f"{rollout_id}/{index}") for index, one in enumerate(kept)),
        num_turns,
        len(checked) - num_turns,
        tuple(forks),
        len(dropped),
        sum(int(one.mask.sum()) for one in dropped),
    )


def turn_metrics(joined: Seq[JoinedTurns]) -> dict[str, float]:
    """What a batch's turns became, for a step's row.

    ``turns/fork_rate`` is the share of the turns after a rollout's first that extended nothing before them: 0 for a
    template that only appends, 1 for one that rewrites the history at each turn. ``turns/masked_share``: positions
    without a sampled token among those of all sequences, which is what forks cost. Absent where undefined.
    """
    later = sum(max(one.num_turns - 1, 0) for one in joined)
    sequences = [sequence for one in joined for sequence in one.sequences]
    positions = sum(len(sequence.tokens) for sequence in sequences)
    metrics = {
        "turns/dropped_sequences": float(sum(one.num_dropped_sequences for one in joined)),
        "turns/dropped_tokens": float(sum(one.num_dropped for one in joined)),
        "turns/empty": float(sum(one.num_empty_turns for one in joined)),
    }
    if later:
        metrics["turns/fork_rate"] = sum(len(one.forks) for one in joined) / later
    if joined:
        metrics["turns/sequences_mean"] = len(sequences) / len(joined)
        metrics["turns/sequences_max"] = float(max(len(one.sequences) for one in joined))
    if positions:
        metrics["turns/masked_share"] = 1 - sum(int(s.loss_mask.sum()) for s in sequences) / positions
    return metrics


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A turn that was checked, in the types of the records."""

    prompt: IntArray
    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    kv_versions: IntArray | None
    routes: RouteArray | None


@dataclass(eq=False)
class _Open:
    """A sequence that further turns may extend."""

    tokens: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    mask: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    kv_versions: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    routes: list[RouteArray] = field(default_factory=list)
    last_turn: int = 0

    def append(self, turn: _Arrays, number: int, oldest: int) -> None:
        """Take up a turn whose prompt begins with ``tokens``; ``oldest``: version of all that was sampled before."""
        between, cached = len(turn.prompt) - len(self.tokens), turn.kv_versions
        if cached is None:
            cached = np.minimum.accumulate(np.minimum(turn.versions, oldest))

        def grown(before: Any, filler: Any, new: Any) -> Any:
            return np.concatenate([before, np.full(between, filler, before.dtype), new])

        self.mask = grown(self.mask, False, np.ones(len(turn.tokens), np.bool_))
        self.logprobs = grown(self.logprobs, 0.0, turn.logprobs)
        self.versions = grown(self.versions, NOT_SAMPLED, turn.versions)
        self.kv_versions = grown(self.kv_versions, NOT_SAMPLED, cached)
        self.tokens = np.concatenate([turn.prompt, turn.tokens])
        self.routes += [] if turn.routes is None else [turn.routes]
        self.last_turn = number

    def sequence(self, name: str) -> Sequence:
        """The record of it under this id."""
        arrays = (self.tokens, self.mask, self.logprobs, self.versions, self.kv_versions)
        return Sequence(name, *arrays, routes=self._routes(name))

    def _routes(self, name: str) -> RouteArray | None:
        """Expert ids [T-1, L, K]: of each position those of the first turn that told them."""
        told = self.routes
        if not told:
            return None
        kinds = {(routes.shape[1:], routes.dtype) for routes in told}
        if len(kinds) > 1:
            shown = ", ".join(f"{dtype} {shape}" for shape, dtype in sorted(kinds, key=str))
            raise ValueError(f"sequence {name}: expert ids of its turns differ in type, layers or number: {shown}")
        missing = np.iinfo(told[0].dtype).max
        found = np.full((len(self.tokens) - 1, *told[0].shape[1:]), missing, told[0].dtype)
        for routes in told:
            known = found[: len(routes)]
            np.copyto(known, routes, where=known == missing)
        return found


def _begins_with(prompt: IntArray, tokens: IntArray) -> bool:
    return len(prompt) >= len(tokens) and bool(np.array_equal(prompt[: len(tokens)], tokens))


def _fork(number: int, prompt: IntArray, before: Seq[_Open]) -> Fork:
    common = [_num_common(prompt, one.tokens) for one in before]
    nearest = int(np.argmax(common))
    return Fork(number, common[nearest], len(before[nearest].tokens))


def _num_common(first: IntArray, second: IntArray) -> int:
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def _checked(turn: Turn, where: str, vocab_size: int | None) -> _Arrays:
    """The turn's arrays, if everything about it fits."""
    limit = MAX_ID if vocab_size is None else vocab_size - 1
    prompt = _integers(turn.prompt_tokens, f"{where}: prompt_tokens", 0, limit)
    if not len(prompt):
        raise ValueError(f"{where}: the prompt has no token; the first sampled token needs something before it")
    tokens = _integers(turn.tokens, f"{where}: tokens", 0, limit)
    logprobs = np.asarray(turn.logprobs)
    if logprobs.ndim != 1 or (logprobs.size and logprobs.dtype.kind != "f"):
        raise ValueError(f"{where}: logprobs must be a list of floats, not {logprobs.dtype} {logprobs.shape}")
    versions = _integers(turn.versions, f"{where}: versions", 0, MAX_ID)
    cached = turn.kv_versions
    kv_versions = None if cached is None else _integers(cached, f"{where}: kv_versions", 0, MAX_ID)
    for name, values in (("logprobs", logprobs), ("versions", versions), ("kv_versions", kv_versions)):
        if values is not None and len(values) != len(tokens):
            raise ValueError(f"{where}: {len(values)} {name} for {len(tokens)} sampled tokens; one each is needed")
    fed = len(prompt) + len(tokens) - 1
    routes = turn.routes
    if routes is not None and (routes.ndim != 3 or len(routes) != fed or routes.dtype.kind != "u"):
        raise ValueError(
            f"{where}: expert ids are {routes.dtype} {routes.shape}; {len(prompt)} prompt and {len(tokens)} sampled "
            f"tokens need unsigned [{fed}, layers, experts per token]"
        )
    return _Arrays(prompt, tokens, logprobs.astype(np.float32), versions, kv_versions, routes)


def _integers(values: Any, what: str, low: int, high: int) -> IntArray:
    """``values`` as int32 [n]. Raises ValueError for anything that is not a list of integers from low to high."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{what} must be a list of integers, not {array.dtype} {array.shape}")
    outside = np.flatnonzero((array < low) | (array > high)) if array.size else array
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"{what}[{at}] is {array[at]}; expected are integers from {low} to {high}")
    return array.astype(np.int32)
