"""``rollouts/step-N.parquet``: what was sampled in a step and what both sides thought of it. One row per sequence.

=================  ================  ===================================================================================
column             type              meaning
=================  ================  ===================================================================================
step               int64             step of the run
rollout_id         string            several rows share it when a rollout has several sequences
group_id           string            samples of one prompt
problem_id         string
prompt_text        string            the problem's prompt; chat messages as a JSON list
answer             string?           reference answer
completion_text    string            text of the rollout that was scored
status             string            finished, truncated, aborted, failed
reward             double?           null: every reward function abstained
correct            bool?             null: the task has no such notion
formatted          bool?
parts              string            JSON object: the reward's parts by name
score_error        string?           why a grader failed
replica            int32             which engine sampled it
sequence_id        string
tokens             list<int32>  [T]  prompt, sampled and tool tokens in order
token_texts        list<string>? [T] text of each token alone; null: not recorded
loss_mask          list<bool>   [T]  true where the policy sampled the token and it counts
rollout_logprobs   list<float>  [T]  what the engine reported
train_logprobs     list<float>? [T]  what the trainer computed at the same version; null: it did not see the sequence
versions           list<int32>  [T]  policy version that sampled the token, -1 in the prompt
kv_versions        list<int32>  [T]  oldest version in the cache that the token attended to
routes             binary?           expert ids [T-1, L, K] by the position that was fed: one byte each, or two (little
                                     endian) above 255 experts; all bits set: missing; null: not recorded
routes_shape       list<int32>?      [T-1, L, K]; with the length of routes it gives the bytes of an id
=================  ================  ===================================================================================

Log-probs are stored as they are: NaN and infinities survive.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.durable import replace_file
from lockstep.metrics.metric import decode_nonfinite, encode_nonfinite
from lockstep.records import FloatArray, IntArray, Rollout, RouteArray, Sequence

TokenTexts = Callable[[IntArray], Seq[str]]
"""Text of each token by itself: token ids [T] to T strings."""

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("prompt_text", pa.string(), nullable=False),
        pa.field("answer", pa.string()),
        pa.field("completion_text", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("correct", pa.bool_()),
        pa.field("formatted", pa.bool_()),
        pa.field("parts", pa.string(), nullable=False),
        pa.field("score_error", pa.string()),
        pa.field("replica", pa.int32(), nullable=False),
        pa.field("sequence_id", pa.string(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("token_texts", pa.list_(pa.string())),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("rollout_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("train_logprobs", pa.list_(pa.float32())),
        pa.field("versions", pa.list_(pa.int32()), nullable=False),
        pa.field("kv_versions", pa.list_(pa.int32()), nullable=False),
        pa.field("routes", pa.binary()),
        pa.field("routes_shape", pa.list_(pa.int32())),
    ]
)


@dataclass(frozen=True, slots=True)
class RecordedSequence:
    """One row of the file. ``sequence`` is the engine's record, ``train_logprobs`` [T] the trainer's (None: unseen)."""

    step: int
    rollout_id: str
    group_id: str
    problem_id: str
    prompt_text: str
    answer: str | None
    completion_text: str
    status: str
    reward: float | None
    correct: bool | None
    formatted: bool | None
    parts: dict[str, float | None]
    score_error: str | None
    replica: int
    sequence: Sequence
    train_logprobs: FloatArray | None
    token_texts: tuple[str, ...] | None


def write_rollout_file(
    path: Path,
    step: int,
    rollouts: Seq[Rollout],
    train_logprobs: Mapping[str, FloatArray],
    token_texts: TokenTexts | None = None,
) -> None:
    """Write the file whole or not at all. ``train_logprobs`` maps sequence ids to arrays [T]; sequences that the
    trainer did not see may be left out. Raises ValueError for an array of another length or an unknown sequence id."""
    known = {sequence.sequence_id for rollout in rollouts for sequence in rollout.sequences}
    if unknown := sorted(set(train_logprobs) - known):
        raise ValueError(f"step {step}: train_logprobs of sequences that are in no rollout: {', '.join(unknown[:5])}")
    rows = [
        _to_row(step, rollout, sequence, train_logprobs.get(sequence.sequence_id), token_texts)
        for rollout in rollouts
        for sequence in rollout.sequences
    ]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    replace_file(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def read_rollout_file(path: Path) -> list[RecordedSequence]:
    """All rows, in the order in which they were written."""
    return [_from_row(row) for row in pq.read_table(path, schema=SCHEMA).to_pylist()]


def _to_row(
    step: int, rollout: Rollout, sequence: Sequence, train: FloatArray | None, token_texts: TokenTexts | None
) -> dict[str, object]:
    problem, score = rollout.problem, rollout.score
    texts = None if token_texts is None else list(token_texts(sequence.tokens))
    for name, values in (("train_logprobs", train), ("token_texts", texts)):
        if values is not None and len(values) != len(sequence.tokens):
            raise ValueError(
                f"step {step}, sequence {sequence.sequence_id}: {name} has {len(values)} entries for "
                f"{len(sequence.tokens)} tokens"
            )
    return {
        "step": step,
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "problem_id": problem.problem_id,
        "prompt_text": _storable(problem.prompt if isinstance(problem.prompt, str) else json.dumps(problem.prompt)),
        "answer": None if problem.answer is None else _storable(problem.answer),
        "completion_text": _storable(rollout.text),
        "status": rollout.status,
        "reward": score.reward,
        "correct": score.correct,
        "formatted": score.formatted,
        "parts": json.dumps(encode_nonfinite(score.parts), allow_nan=False),
        "score_error": None if score.error is None else _storable(score.error),
        "replica": rollout.replica,
        "sequence_id": sequence.sequence_id,
        "tokens": sequence.tokens,
        "token_texts": None if texts is None else [_storable(text) for text in texts],
        "loss_mask": sequence.loss_mask,
        "rollout_logprobs": sequence.logprobs,
        "train_logprobs": None if train is None else np.asarray(train, np.float32),
        "versions": sequence.versions,
        "kv_versions": sequence.kv_versions,
        "routes": None if sequence.routes is None else _little_endian(sequence.routes).tobytes(),
        "routes_shape": None if sequence.routes is None else list(sequence.routes.shape),
    }


def _little_endian(routes: RouteArray) -> np.ndarray:
    return np.ascontiguousarray(routes, routes.dtype.newbyteorder("<"))


def _storable(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate, which a decoder may leave, becomes U+FFFD."""
    return text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")


def _from_row(row: dict) -> RecordedSequence:
    routes = None
    if row["routes"] is not None:
        shape = tuple(row["routes_shape"])
        kind = np.uint8 if len(row["routes"]) == math.prod(shape) else np.uint16
        routes = np.frombuffer(row["routes"], np.dtype(kind).newbyteorder("<")).reshape(shape).astype(kind)
    sequence = Sequence(
        sequence_id=row["sequence_id"],
        tokens=np.array(row["tokens"], np.int32),
        loss_mask=np.array(row["loss_mask"], np.bool_),
        logprobs=np.array(row["rollout_logprobs"], np.float32),
        versions=np.array(row["versions"], np.int32),
        kv_versions=np.array(row["kv_versions"], np.int32),
        routes=routes,
    )
    train, texts = row["train_logprobs"], row["token_texts"]
    parts = decode_nonfinite(json.loads(row["parts"]))
    return RecordedSequence(
        **{
            name: row[name]
            for name in (
                "step",
                "rollout_id",
                "group_id",
                "problem_id",
                "prompt_text",
                "answer",
                "completion_text",
                "status",
                "reward",
                "correct",
                "formatted",
                "score_error",
                "replica",
            )
        },
        parts=parts if isinstance(parts, dict) else {},
        sequence=sequence,
        train_logprobs=None if train is None else np.array(train, np.float32),
        token_texts=None if texts is None else tuple(texts),
    )
