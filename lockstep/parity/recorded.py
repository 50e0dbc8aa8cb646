"""Agreement of a run made elsewhere, from its recorded arrays: a ``.parquet`` or ``.npz`` file.

=================  ======  =======================================================================================
column             type    meaning
=================  ======  =======================================================================================
train_logprobs     float   **needed**: the trainer's log-prob of each token; a row that is null as a whole is left out
rollout_logprobs   float   **needed**: what the engine reported
loss_mask          bool    1 where the policy sampled the token; without it every token counts
sequence_id        any     which tokens are one sequence (flat files; a row of a file with rows is one anyhow)
rollout_id         any     several sequences may belong to one
step               int     a page has one point per step; without it everything is step 1
replica            any     which engine sampled it
versions           int     policy version that sampled the token
kv_versions        int     oldest version in the cache that it attended to
trainer_version    int     the trainer's version; without it staleness is not decided
positions          int     place in the response; otherwise the rank among the sequence's counted tokens
tokens             int     token id
token_texts        text    text of each token, for the worst ones in context
train_top1         int     argmax ids of both sides, −1: not known
rollout_top1       int
train_routes       int     ``.npz`` only: expert ids […, L, K] of the forward that gave the token's log-prob
rollout_routes     int
rejected           bool    tokens that a correction dropped
=================  ======  =======================================================================================

A file is *flat* (one value per token in every column) or has *rows* (one sequence each): in parquet the token columns
are lists, in npz arrays [B, T]; ``step``, ``rollout_id``, ``sequence_id``, ``replica`` and ``trainer_version`` have
one value per row then. Index t of all columns is the same token. The ``rollouts/step-*.parquet`` of a run folder is
such a file. Other columns are ignored. Files are untrusted: nothing is unpickled, and sizes and types are checked
before data is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.agreement import Agreement, TokenPair, finish, measure, merge
from lockstep.parity.columns import Columns, RecordedError, read_columns
from lockstep.parity.rows import agreement_row, quoted

__all__ = ["RecordedError", "RecordedRun", "RecordedStep", "measure_file"]

MAX_CONTEXT = 24
MOST_LOGPROB = 1e-3
"""A log-prob that is larger is none; rounding stays far below."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step's numbers; ``row`` is the line that a run folder's ``agreement.jsonl`` would have."""

    step: int
    agreement: Agreement
    row: dict[str, object]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """``whole``: all steps as one (merged, if there are several). ``notes``: what the file could not say."""

    path: Path
    steps: tuple[RecordedStep, ...]
    whole: Agreement
    notes: tuple[str, ...]


def measure_file(path: Path | str) -> RecordedRun:
    """Measure a recorded file. Raises RecordedError, which names the column, if it can't be read as one, and
    FileNotFoundError if it is not there."""
    columns = read_columns(Path(path))
    notes = list(columns.notes)
    if columns.of("loss_mask") is None:
        notes.append("There is no column loss_mask: every token counts as sampled.")
    dated = [name for name in ("versions", "kv_versions") if columns.of(name) is not None]
    if bool(dated) != (columns.of("trainer_version") is not None):
        missing = "trainer_version" if dated else "versions"
        notes.append(f"There is no column {missing}: stale tokens can't be told from numerical mismatch.")
    if not columns.has_rows and columns.of("sequence_id") is None and columns.of("rollout_id") is None:
        notes.append("There is no column sequence_id: metrics by sequence and buckets by position are absent.")
    if doubt := _not_logprobs(columns):
        notes.append(doubt)
    steps: tuple[RecordedStep, ...] = tuple(_measured(columns, step) for step in columns.steps())
    if not steps:
        raise RecordedError(f"{path}: there is not a single token in it")
    if len(steps) == 1:
        return RecordedRun(Path(path), steps, steps[-1].agreement, tuple(notes))
    notes.append("Quantiles over all steps together are within 0.5 % of the exact ones; those of a step are exact.")
    whole = finish(merge(step.agreement.partial for step in steps))
    return RecordedRun(Path(path), steps, whole, tuple(notes))


def _not_logprobs(columns: Columns) -> str | None:
    """Words of doubt where sampled tokens have values above 0, which no log-prob is (rounding aside)."""
    mask = columns.of("loss_mask")
    for name in ("train_logprobs", "rollout_logprobs"):
        values = columns.values[name] if mask is None else columns.values[name][mask]
        above = int((values > MOST_LOGPROB).sum())
        if above:
            return (
                f"Column {name} is above 0 for {above} of {len(values)} sampled tokens: no log-prob is. Negate "
                "negative log-likelihoods, and take the logarithm of probabilities."
            )
    return None


def _measured(columns: Columns, step: int) -> RecordedStep:
    try:
        return _measure_step(columns, step)
    except RecordedError:
        raise
    except ValueError as error:  # what only the measure finds, as values that contradict each other
        raise RecordedError(f"{columns.path}, step {step}: {error}") from error


def _measure_step(columns: Columns, step: int) -> RecordedStep:
    chosen = np.flatnonzero(columns.step == step)
    part = {name: values[chosen] for name, values in columns.values.items()}
    version = _trainer_version(columns.path, part.get("trainer_version"), step)
    sequence = part.get("sequence_id", part.get("row"))
    rollout = part.get("rollout_id")
    versions, kv_versions = (None if version is None else part.get(name) for name in ("versions", "kv_versions"))
    if version is not None and versions is None and kv_versions is None:
        version = None
    agreement = measure(
        part["train_logprobs"],
        part["rollout_logprobs"],
        part.get("loss_mask", np.ones(len(chosen), dtype=bool)),
        sequence_ids=None if sequence is None else [(step, label) for label in sequence.tolist()],
        rollout_ids=None if rollout is None else [(step, label) for label in rollout.tolist()],
        replicas=part.get("replica"),
        versions=versions,
        kv_versions=kv_versions,
        version=version,
        positions=part.get("positions"),
        train_top1=part.get("train_top1"),
        rollout_top1=part.get("rollout_top1"),
        train_routes=part.get("train_routes"),
        rollout_routes=part.get("rollout_routes"),
        rejected=part.get("rejected"),
    )
    return RecordedStep(step, agreement, agreement_row(agreement, step, lambda pair: _describe(part, pair)))


def _trainer_version(path: Path, values: np.ndarray | None, step: int) -> int | None:
    if values is None:
        return None
    found = np.unique(values)
    if len(found) != 1:
        raise RecordedError(
            f"{path}: column trainer_version has the values {found[:5].tolist()} in step {step}; a step is measured "
            "against one trainer: give such tokens steps of their own"
        )
    return int(found[0])


def _describe(part: dict[str, np.ndarray], pair: TokenPair) -> dict[str, object]:
    """What the file says about a token beside its numbers; ``pair.column`` counts the step's tokens."""
    index = pair.column
    found: dict[str, object] = {"token": index}
    sequence: np.ndarray | None = part.get("sequence_id", part.get("row"))
    if sequence is not None:
        low = index
        while low > 0 and index - low < MAX_CONTEXT and sequence[low - 1] == sequence[index]:
            low -= 1
        high = index + 1
        while high < len(sequence) and high - index < MAX_CONTEXT // 3 and sequence[high] == sequence[index]:
            high += 1
        found |= {"sequence_id": str(sequence[index]), "token": index - int(np.argmax(sequence == sequence[index]))}
    else:
        low, high = max(0, index - MAX_CONTEXT), index + 1
    for name, key in (("tokens", "id"), ("versions", "version"), ("replica", "replica"), ("rollout_id", "rollout_id")):
        if name in part:
            value: Any = part[name][index]
            found[key] = value.item() if isinstance(value, np.generic) else value
    if "token_texts" in part:
        texts = [str(text) for text in part["token_texts"][low:high]]
        at = index - low
        around = {"before": "".join(texts[:at]), "text": texts[at], "after": "".join(texts[at + 1 :])}
        found |= {name: quoted(text) for name, text in around.items()}
    return found
