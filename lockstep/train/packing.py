"""Micro-batches: which sequences share a forward, how they lie in it, and which hidden row predicts which token.

Layouts (R rows of n positions each; nothing after a sequence's last sampled token is fed to the model, nor that token
itself, because no counted log-prob depends on them):

- ``single``: one sequence per micro-batch.
- ``padded``: one sequence per row, padding at the right. Causal models never look to the right, so no mask is needed.
- ``packed``: several sequences per row, positions restart, and a mask keeps them apart.
- ``shared_prompt``: like packed, but sequences with the same leading prompt store it once; each continuation sees the
  prompt and itself. The samples of a GRPO group thus pay for their prompt once. Exact, because in a causal model a
  prompt's states do not depend on what follows. For architectures whose only mixing of positions is masked attention.
  Sequences whose prompt went through other experts do not share it, if those are to be replayed.

Rows keep close to the longest sequence, because attention is dense over a row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.records import BoolArray, IntArray

Layout = Literal["single", "padded", "packed", "shared_prompt"]

ROW_TOKENS = 128
"""Rows of several sequences are filled up to this length even if every sequence is shorter: attention over 128
positions costs little beside the linears, and short rows would leave more padding."""


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """A sequence's tokens [T], the positions [T] whose log-prob is wanted (never position 0), and, where they are to
    be replayed, expert ids [T-1, L, K] (-1: missing)."""

    tokens: IntArray
    wanted: BoolArray
    routes: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward. Flat indices count positions row by row: ``row * n + column``.

    ``segments`` and ``prefixes`` [R, n] (None: one sequence per row) say who may see whom: position j sees an earlier
    k of its row if ``segments[k]`` is ``segments[j]`` or ``prefixes[j]``. Wanted log-prob m belongs to token
    ``tokens[m]`` at position ``positions[m]`` of sequence ``sequences[m]`` (an index into the planner's input) and is
    predicted by flat position ``predictors[m]``; predictors never decrease. ``inputs[s]`` holds the flat positions of
    the tokens that sequence s fed to the model.
    """

    input_ids: NDArray[np.int64]  # [R, n]
    position_ids: NDArray[np.int64]  # [R, n]
    segments: NDArray[np.int64] | None
    prefixes: NDArray[np.int64] | None
    members: tuple[int, ...]
    predictors: NDArray[np.int64]  # [M]
    tokens: NDArray[np.int64]  # [M]
    sequences: NDArray[np.int64]  # [M]
    positions: NDArray[np.int64]  # [M]
    inputs: dict[int, NDArray[np.int64]]

    @property
    def num_tokens(self) -> int:
        """Positions of the forward, padding included."""
        return self.input_ids.size


@dataclass(frozen=True, slots=True)
class _Tree:
    """A prompt stored once and the continuations of its sequences. Without sharing the whole sequence is the prompt."""

    prompt: IntArray
    members: tuple[int, ...]
    continuations: tuple[IntArray, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(len(part) for part in self.continuations)


def plan(
    sequences: Seq[WantedTokens], layout: Layout, max_tokens: int, max_row_tokens: int | None = None
) -> list[MicroBatch]:
    """Micro-batches of at most ``max_tokens`` positions that cover every sequence with a wanted token exactly once.

    A sequence longer than ``max_tokens`` gets a micro-batch of its own. ``max_row_tokens`` bounds the length of a row
    of several sequences (default: four times the longest sequence, at least ``ROW_TOKENS``). Deterministic.
    """
    for index, sequence in enumerate(sequences):
        if len(sequence.wanted) and sequence.wanted[0]:
            raise ValueError(f"sequence {index}: the log-prob of the first token is undefined, it has no context")
    lengths = [_num_inputs(sequence) for sequence in sequences]
    active = [index for index, length in enumerate(lengths) if length > 0]
    if not active:
        return []
    longest = max(lengths)
    row_limit = max_row_tokens if max_row_tokens is not None else max(ROW_TOKENS, 4 * longest)
    row_limit = min(row_limit, max(max_tokens, longest))
    if layout == "shared_prompt":
        trees = _shared_trees(sequences, active, lengths, row_limit)
    else:
        trees = [_Tree(sequences[i].tokens[: lengths[i]], (i,), (sequences[i].tokens[:0],)) for i in active]
    trees.sort(key=lambda tree: -tree.length)
    if layout == "single":
        groups = [[[tree]] for tree in trees]
    else:
        groups = _fill(trees, max_tokens, several=layout in ("packed", "shared_prompt"))
    return [_lay_out(rows, sequences, masked=layout in ("packed", "shared_prompt")) for rows in groups]


def _num_inputs(sequence: WantedTokens) -> int:
    """Tokens to feed: everything before the last wanted one."""
    wanted = np.flatnonzero(sequence.wanted)
    return int(wanted[-1]) if len(wanted) else 0


def _shared_trees(sequences: Seq[WantedTokens], active: list[int], lengths: list[int], row_limit: int) -> list[_Tree]:
    """Sequences grouped by the tokens before their first wanted one; a group too long for a row is cut into several."""
    groups: dict[bytes, list[int]] = {}
    for index in active:
        first = int(np.flatnonzero(sequences[index].wanted)[0])
        groups.setdefault(np.ascontiguousarray(sequences[index].tokens[:first]).tobytes(), []).append(index)
    trees = []
    for members in (part for group in groups.values() for part in _same_experts(group, sequences)):
        first = int(np.flatnonzero(sequences[members[0]].wanted)[0])
        prompt = sequences[members[0]].tokens[:first]
        part: list[int] = []
        length = first
        for index in sorted(members, key=lambda i: -lengths[i]):
            extra = lengths[index] - first
            if part and length + extra > row_limit:
                trees.append(_tree(prompt, part, sequences, lengths))
                part, length = [], first
            part.append(index)
            length += extra
        trees.append(_tree(prompt, part, sequences, lengths))
    return trees


def _same_experts(members: list[int], sequences: Seq[WantedTokens]) -> list[list[int]]:
    """Members of one prompt in parts whose experts agree on it wherever two of them know them."""
    parts: list[tuple[NDArray[np.int32] | None, list[int]]] = []
    for index in members:
        routes = sequences[index].routes
        # The last prompt position predicts the first wanted token: it is part of the prompt.
        prompt = None if routes is None else np.sort(routes[: int(np.flatnonzero(sequences[index].wanted)[0])], axis=-1)
        for place, (known, part) in enumerate(parts):
            if known is None or prompt is None:
                same = known is prompt
            else:
                same = bool(((known == prompt) | (known < 0) | (prompt < 0)).all())
            if same:
                merged = None if known is None or prompt is None else np.where(known < 0, prompt, known)
                parts[place] = (merged, [*part, index])
                break
        else:
            parts.append((prompt, [index]))
    return [part for _, part in parts]


def _tree(prompt: IntArray, members: list[int], sequences: Seq[WantedTokens], lengths: list[int]) -> _Tree:
    parts = tuple(sequences[i].tokens[len(prompt) : lengths[i]] for i in members)
    return _Tree(prompt, tuple(members), parts)


def _fill(trees: list[_Tree], max_tokens: int, several: bool) -> list[list[list[_Tree]]]:
    """Trees, longest first, into micro-batches of rows: first fit where a row may hold ``several``, else one a row.

    A micro-batch is closed when what is left would fill less than a quarter of its long rows, whose attention is
    quadratic.
    """
    groups: list[list[list[_Tree]]] = []
    free: list[int] = []  # free positions of each row of the open micro-batch
    width = 0
    for tree in trees:
        place = next((i for i, room in enumerate(free) if room >= tree.length), None) if several else None
        too_short = several and width > 4 * max(tree.length, ROW_TOKENS)
        if place is not None and not too_short:
            groups[-1][place].append(tree)
            free[place] -= tree.length
            continue
        if not groups or too_short or (len(free) + 1) * width > max_tokens:
            groups.append([])
            free = []
            width = max(tree.length, min(ROW_TOKENS, max_tokens)) if several else tree.length
        groups[-1].append([tree])
        free.append(width - tree.length)
    return groups


def _lay_out(rows: list[list[_Tree]], sequences: Seq[WantedTokens], masked: bool) -> MicroBatch:
    num_rows, width = len(rows), max(sum(tree.length for tree in row) for row in rows)
    input_ids = np.zeros((num_rows, width), dtype=np.int64)
    position_ids = np.tile(np.arange(width, dtype=np.int64), (num_rows, 1))
    segments = np.full((num_rows, width), -1, dtype=np.int64)
    prefixes = np.full((num_rows, width), -2, dtype=np.int64)
    inputs: dict[int, NDArray[np.int64]] = {}
    segment = 0
    for row, trees in enumerate(rows):
        column = 0
        for tree in trees:
            start, length = column, len(tree.prompt)
            root = segment
            input_ids[row, start : start + length] = tree.prompt
            position_ids[row, start : start + length] = np.arange(length)
            segments[row, start : start + length] = root
            segment, column = segment + 1, start + length
            base = row * width
            for index, part in zip(tree.members, tree.continuations, strict=True):
                stop = column + len(part)
                input_ids[row, column:stop] = part
                position_ids[row, column:stop] = length + np.arange(len(part))
                segments[row, column:stop] = segment
                prefixes[row, column:stop] = root
                inputs[index] = base + np.concatenate([np.arange(start, start + length), np.arange(column, stop)])
                segment, column = segment + 1, stop
    members = tuple(sorted(inputs))
    predictors, tokens, owners, positions = _targets(members, inputs, sequences)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments if masked else None,
        prefixes=prefixes if masked else None,
        members=members,
        predictors=predictors,
        tokens=tokens,
        sequences=owners,
        positions=positions,
        inputs=inputs,
    )


def _targets(
    members: tuple[int, ...], inputs: dict[int, NDArray[np.int64]], sequences: Seq[WantedTokens]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Predictor, token, sequence and position of every wanted log-prob, in order of the predictor."""
    positions = [np.flatnonzero(sequences[i].wanted).astype(np.int64) for i in members]
    predictors = np.concatenate([inputs[i][p - 1] for i, p in zip(members, positions, strict=True)])
    tokens = np.concatenate([sequences[i].tokens[p] for i, p in zip(members, positions, strict=True)])
    owners = np.repeat(np.array(members, dtype=np.int64), [len(p) for p in positions])
    order = np.argsort(predictors, kind="stable")
    return predictors[order], tokens[order].astype(np.int64), owners[order], np.concatenate(positions)[order]
