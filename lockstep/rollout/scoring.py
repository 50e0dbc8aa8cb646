"""Log-probs of given tokens by an engine's decoder: in one prefill, or token by token over the cache.

The decode path is what an engine really samples by; a fault in its own layouts or caches shows there and not in a
prefill. It prefills what came before the first counted token (at least one token) and decodes the rest by force.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

import numpy as np
import torch

from lockstep.interfaces import LogProbs
from lockstep.records import Sequence
from lockstep.rollout.decoding import Decoder

_ROWS_AT_ONCE = 256  # rows of float32 logits that exist at once


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """float32 log-probs of ``targets`` [n] under softmax(logits [n, V] / temperature), and the argmax ids [n]."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    picked = scaled.gather(1, targets[:, None])[:, 0] - scaled.logsumexp(dim=1)
    return picked.numpy(), scaled.argmax(dim=1).to(torch.int32).numpy()


def score_sequences(
    decoder: Decoder,
    sequences: Seq[Sequence],
    *,
    path: Literal["prefill", "decode"],
    temperature: float,
    want_routes: bool,
    max_tokens: int,
    version: int,
) -> dict[str, LogProbs]:
    """See ``interfaces.Engine.score``."""
    results: dict[str, LogProbs] = {}
    with torch.inference_mode():
        for batch in _batches(sequences, max_tokens):
            if path == "prefill":
                scored = _by_prefill(decoder, batch, temperature, want_routes, max_tokens)
            else:
                scored = _by_decode(decoder, batch, temperature, want_routes, max_tokens)
            for sequence, (logprobs, top1, routes) in zip(batch, scored, strict=True):
                results[sequence.sequence_id] = LogProbs(logprobs, version, routes, top1)
    return results


_Scored = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _batches(sequences: Seq[Sequence], max_tokens: int) -> list[list[Sequence]]:
    """Sequences by length, in batches of at most ``max_tokens`` (a longer one alone)."""
    batches: list[list[Sequence]] = []
    room = 0
    for sequence in sorted(sequences, key=lambda s: len(s.tokens)):
        if not batches or len(sequence.tokens) > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(sequence)
        room -= len(sequence.tokens)
    return batches


def _by_prefill(
    decoder: Decoder, batch: Seq[Sequence], temperature: float, want_routes: bool, max_tokens: int
) -> list[_Scored]:
    # The last token is not fed: nothing is predicted from it.
    inputs = [_ids(sequence.tokens[:-1]) for sequence in batch]
    fed = [ids for ids in inputs if len(ids)]
    prefilled = iter(decoder.prefill(fed, keep_cache=False, want_routes=want_routes, max_tokens=max_tokens))
    scored: list[_Scored] = []
    for sequence, ids in zip(batch, inputs, strict=True):
        logprobs, top1 = _blank(len(sequence.tokens))
        routes = None
        if len(ids):
            result = next(prefilled)
            routes = result.routes
            logprobs[1:], top1[1:] = _of_hidden(decoder, result.hidden, _ids(sequence.tokens[1:]), temperature)
        scored.append((logprobs, top1, routes))
    return scored


def _by_decode(
    decoder: Decoder, batch: Seq[Sequence], temperature: float, want_routes: bool, max_tokens: int
) -> list[_Scored]:
    state = decoder.new_state(len(batch))
    tokens = [_ids(sequence.tokens) for sequence in batch]
    starts = [_first_counted(sequence) for sequence in batch]
    prefixes = [ids[:start] for ids, start in zip(tokens, starts, strict=True)]
    prefilled = decoder.prefill(prefixes, keep_cache=True, want_routes=want_routes, max_tokens=max_tokens)
    blanks = [_blank(len(ids)) for ids in tokens]
    routes: list[list[np.ndarray]] = [[] for _ in batch]
    for slot, (ids, start, result) in enumerate(zip(tokens, starts, prefilled, strict=True)):
        logprobs, top1 = blanks[slot]
        targets = ids[1 : start + 1]
        logprobs[1 : start + 1], top1[1 : start + 1] = _of_hidden(
            decoder, result.hidden[: len(targets)], targets, temperature
        )
        if result.routes is not None:
            routes[slot].append(result.routes)
        state.place(result, [slot])
    position = list(starts)
    active = list(range(len(batch)))
    while True:
        done = [slot for slot in active if position[slot] >= len(tokens[slot]) - 1]
        state.release(done)
        active = [slot for slot in active if position[slot] < len(tokens[slot]) - 1]
        if not active:
            break
        fed = torch.stack([tokens[slot][position[slot]] for slot in active])
        logits, step_routes = state.decode(active, fed, want_routes)
        targets = torch.stack([tokens[slot][position[slot] + 1] for slot in active])
        step_logprobs, step_top1 = token_logprobs(logits, targets, temperature)
        for row, slot in enumerate(active):
            position[slot] += 1
            blanks[slot][0][position[slot]] = step_logprobs[row]
            blanks[slot][1][position[slot]] = step_top1[row]
            if step_routes is not None:
                routes[slot].append(step_routes[row : row + 1])
    return [
        (logprobs, top1, np.concatenate(pieces)[: len(logprobs) - 1] if pieces else None)
        for (logprobs, top1), pieces in zip(blanks, routes, strict=True)
    ]


def _of_hidden(
    decoder: Decoder, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    logprobs = np.empty(len(targets), dtype=np.float32)
    top1 = np.empty(len(targets), dtype=np.int32)
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        logprobs[rows], top1[rows] = token_logprobs(decoder.logits(hidden[rows]), targets[rows], temperature)
    return logprobs, top1


def _first_counted(sequence: Sequence) -> int:
    counted = np.flatnonzero(sequence.loss_mask)
    return int(counted[0]) if len(counted) else 1


def _blank(length: int) -> tuple[np.ndarray, np.ndarray]:
    logprobs, top1 = np.empty(length, dtype=np.float32), np.empty(length, dtype=np.int32)
    logprobs[:1], top1[:1] = np.nan, -1
    return logprobs, top1


def _ids(tokens: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(tokens, dtype=np.int64))
