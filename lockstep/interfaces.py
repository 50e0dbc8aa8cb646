"""The protocols between trainer, engine, refit, tasks and loop. Narrow on purpose; nothing optional.

Results are keyed by ``sequence_id``, because packing is a rank's own business. Only the loop knows about event loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np

from lockstep.records import (
    Batch,
    Completion,
    DerivedReport,
    FloatArray,
    GenerateRequest,
    LiveTensor,
    Manifest,
    Naming,
    OptimOutput,
    Problem,
    Quantisation,
    RouteArray,
    Score,
    Sequence,
    StepOutput,
    TrainSequence,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probs of one sequence's tokens under one policy version.

    ``logprobs`` [T] float32 (index t belongs to token t; index 0 is NaN: it has no context), ``routes``
    [T-1, L, K] the expert ids that its routers chose, if it has experts and they were asked for, ``top1`` [T] argmax
    token ids (-1 at 0).
    """

    logprobs: FloatArray
    version: int
    routes: RouteArray | None = None
    top1: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The M tokens of one micro-batch that count, flat, as an objective sees them. Tensors are float32 unless said.

    A sequence is never split over micro-batches, so sequence-level quantities are segment sums over
    ``sequence_index``. ``old`` is already the anchor (``logprobs.detach()`` when the batch is on-policy).
    ``tokens_per_rollout`` counts over *all* sequences of the token's rollout in the global batch.
    """

    logprobs: torch.Tensor  # [M] live, carries the gradient
    old: torch.Tensor  # [M]
    rollout: torch.Tensor  # [M] what the engine reported
    advantages: torch.Tensor  # [M]
    weights: torch.Tensor  # [M] correction weights, 1 where there are none
    reference: torch.Tensor | None  # [M]
    sequence_index: torch.Tensor  # [M] int64, 0..num_sequences-1
    num_sequences: int
    tokens_per_rollout: torch.Tensor  # [M] len_i of the token's rollout
    num_tokens: int  # N of the global optimizer batch
    num_rollouts: int  # B of the global optimizer batch


@dataclass(frozen=True, slots=True)
class LossOutput:
    """``loss``: this micro-batch's share of the global loss (already divided by global denominators). ``sums``:
    detached sums over tokens, to be added over micro-batches and ranks and divided by N afterwards."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]


class Objective(Protocol):
    """Turns log-probs into a loss. Pure: no state between calls."""

    def __call__(self, tokens: LossTokens) -> LossOutput: ...

    def needs_gradient(self, item: TrainSequence) -> bool:
        """False if the item's gradient is exactly zero whatever the log-probs (advantage 0, no KL): its forward may
        then run without a backward."""
        ...


class WeightSource(Protocol):
    """The trainer's weights as a refit sees them."""

    def manifest(self) -> Manifest:
        """Names, global shapes, dtypes and atomic groups in order; needs no gather."""
        ...

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """(checkpoint name, global shape, offset of this shard, tensor); collective over ranks."""
        ...


class WeightReceiver(Protocol):
    """An engine's side of a refit. ``begin`` refuses before a byte moves; ``abort`` leaves the engine unfit."""

    @property
    def naming(self) -> Naming:
        """Whose names it takes and shows: the source is translated to them."""
        ...

    @property
    def quantisation(self) -> Quantisation:
        """How the weights that it takes are quantised: the source is quantised accordingly."""
        ...

    def begin(self, manifest: Manifest) -> None: ...

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors. They may be views of a buffer that is filled again: valid during this call only."""
        ...

    def alias(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the given storage itself instead of a copy (the ``shared`` transport)."""
        ...

    def commit(self) -> tuple[DerivedReport, ...]:
        """Rebuild derived state, drop caches, take up the new version: it may be scored and looked at, and no request
        is admitted yet. Reports what each registry entry changed."""
        ...

    def resume(self) -> None:
        """Admit requests again, once the refit's claims were checked."""
        ...

    def abort(self, reason: str) -> None: ...

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Live parameters and policy buffers under the receiver's names, the engine's layout undone."""
        ...

    def opaque(self) -> dict[str, str]:
        """Names whose live layout can't be undone (a kernel's re-packing), each with the reason; absent in ``live``."""
        ...

    def reload_differences(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str | None]]:
        """Load opaque names again into scratch by the engine's own loader and compare with the live bytes:
        (name, None if equal or what differs). Yields nothing where nothing is opaque."""
        ...

    def derived(self) -> tuple[DerivedReport, ...]:
        """Compare every registered derived state with a rebuild from the live weights, without changing it."""
        ...


@runtime_checkable
class DescribesLive(Protocol):
    """A receiver whose engine lives elsewhere: what is live can be compared where it lies."""

    def described(self, key: int | None) -> Iterator[LiveTensor]:
        """What ``live`` would yield, without its bytes; with a ``key`` (64 bits) the digests of them under it."""
        ...


class Trainer(Protocol):
    """Owns the policy's master weights and the optimizer. ``version`` rises by one at each ``optim_step``."""

    @property
    def version(self) -> int: ...

    def forward_backward(self, batch: Batch, objective: Objective) -> StepOutput:
        """Accumulate the gradient of the batch's loss. Call once per optimizer step."""
        ...

    def optim_step(self) -> OptimOutput: ...

    def drop_gradients(self) -> None:
        """Forget accumulated gradients (the gate stopped the step)."""
        ...

    def logprobs(self, sequences: Seq[Sequence]) -> dict[str, LogProbs]: ...

    def weights(self) -> WeightSource: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...


class Engine(Protocol):
    """Samples completions: token in, token out. ``version`` is the policy version of the weights it serves."""

    @property
    def version(self) -> int: ...

    async def generate(self, request: GenerateRequest) -> Completion: ...

    async def abort(self, request_ids: Iterable[str]) -> None: ...

    def score(self, sequences: Seq[Sequence], path: Literal["prefill", "decode"] = "prefill") -> dict[str, LogProbs]:
        """Log-probs of given tokens at the engine's temperature, by one prefill or token by token over the cache."""
        ...

    def pause(self, mode: Literal["finish", "abort", "keep"] = "finish") -> None: ...

    def resume(self) -> None: ...

    def receiver(self) -> WeightReceiver: ...


class Scorer(Protocol):
    """A reference or a teacher, wherever it runs."""

    def logprobs(self, sequences: Seq[Sequence]) -> dict[str, LogProbs]: ...


class Task(Protocol):
    """Problems and their rewards. ``train`` and ``heldout`` are disjoint, deterministic, and indexable for ever:
    ``problem(split, i)`` wraps around its data in an order fixed by the task's seed."""

    name: str

    def num_problems(self, split: Literal["train", "heldout"]) -> int: ...

    def problem(self, split: Literal["train", "heldout"], index: int) -> Problem: ...

    def score(self, problems: Seq[Problem], texts: Seq[str], stopped: Seq[bool]) -> list[Score]:
        """Scores of completions; a grader that fails yields ``Score(reward=None, error=…)``, never a 0."""
        ...

    def gold(self, problem: Problem) -> str:
        """A completion that must score full marks (the proof that the grader agrees with the data)."""
        ...

    def close(self) -> None: ...
