r"""One step's agreement as a line of ``agreement.jsonl``: what the metrics row is too flat for.

::

    {"step": 7, "tokens": 1893,
     "buckets": {"position": {"0": [64, 0.0021, 0.011], "1": …}, "decile": …, "routes": …, "replica": …, "version": …},
     "worst": [{"sequence_id": "s7/3", "token": 41, "id": 284, "text": "\" 17\"", "before": "\"…\"", "after": "\"…\"",
                "train": -3.1, "rollout": -2.2, "version": 6, "replica": 0}, …]}

A bucket is [finite tokens, mean |d|, largest |d|]. ``worst`` has up to 16 tokens: those that are not finite first, then
by |d|. Texts are JSON strings within the JSON (``quoted``), since a token may well read "NaN", which rows use for the
number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from lockstep.records import Rollout

if TYPE_CHECKING:  # the report reads these lines and does without torch
    from lockstep.agreement import Agreement, TokenPair

BEFORE_TOKENS, AFTER_TOKENS = 24, 8


def agreement_row(
    agreement: Agreement, step: int, describe: Callable[[TokenPair], dict[str, object]]
) -> dict[str, object]:
    """The line. ``describe`` tells what is known about a token beside its two log-probs."""
    buckets = {
        kind: {label: [b.num_tokens, b.abs_diff_mean, b.abs_diff_max] for label, b in by_label.items()}
        for kind, by_label in agreement.buckets.items()
    }
    worst = [{**describe(pair), "train": pair.train, "rollout": pair.rollout} for pair in agreement.worst_tokens]
    return {"step": step, "tokens": agreement.num_tokens, "buckets": buckets, "worst": worst}


def token_details(
    rollouts: Seq[Rollout], decode: Callable[[Seq[int]], str] | None = None
) -> Callable[[TokenPair], dict[str, object]]:
    """``describe`` for a step of ours, where ``pair.row`` counts the sequences of ``rollouts``; with ``decode`` also
    the text around the token."""
    pairs = [(rollout, sequence) for rollout in rollouts for sequence in rollout.sequences]

    def describe(pair: TokenPair) -> dict[str, object]:
        rollout, sequence = pairs[pair.row]
        at = pair.column
        found: dict[str, object] = {
            "sequence_id": sequence.sequence_id,
            "rollout_id": rollout.rollout_id,
            "replica": rollout.replica,
            "token": at,
            "id": int(sequence.tokens[at]),
            "version": int(sequence.versions[at]),
        }
        if decode is not None:
            ids = sequence.tokens.tolist()
            around = {
                "before": ids[max(0, at - BEFORE_TOKENS) : at],
                "text": [ids[at]],
                "after": ids[at + 1 : at + 1 + AFTER_TOKENS],
            }
            found |= {name: quoted(decode(part) if part else "") for name, part in around.items()}
        return found

    return describe


def quoted(text: str) -> str:
    """The text as a JSON string, which any reader and writer of rows leaves alone; lone surrogates survive escaped."""
    return json.dumps(text)


def unquoted(value: object) -> str | None:
    """The text of ``quoted``, or None if there is none."""
    return str(json.loads(value)) if isinstance(value, str) else None
