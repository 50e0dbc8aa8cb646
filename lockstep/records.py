"""Frozen records that travel between the parts of Lockstep.

Everything here is plain data over numpy arrays: no torch, so that configuration, tasks and the command line can use
it without paying for the import, and so that a record can cross a process boundary as it is.

Shape suffixes used throughout the project: B rollouts, T tokens of one sequence, N packed tokens, M tokens with
``loss_mask`` 1, V vocabulary, L layers (of experts, in ``routes``), E experts, K experts per token, G group size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]

FinishReason = Literal["stop", "length", "aborted", "failed"]
RolloutStatus = Literal["finished", "truncated", "aborted", "failed"]

NOT_SAMPLED = -1
"""Value of ``versions`` and ``kv_versions`` at positions that no policy sampled (the prompt)."""

RouteArray = NDArray[np.uint8 | np.uint16]
"""Expert ids [positions, L, K] in the smallest unsigned type that holds them beside the flag for *missing*, which is
the type's largest value: one byte each up to 255 experts, two bytes above."""


def route_dtype(num_experts: int) -> np.dtype:
    """The type of a ``RouteArray`` for this many experts. Raises ValueError above 65535."""
    for kind in (np.uint8, np.uint16):
        if num_experts <= np.iinfo(kind).max:
            return np.dtype(kind)
    raise ValueError(f"{num_experts} experts: ids of at most 65535 fit into two bytes beside the flag for missing")


def compact_routes(ids: NDArray[np.signedinteger], num_experts: int) -> RouteArray:
    """Expert ids with -1 for missing as a ``RouteArray``. Raises ValueError for an id that is no expert."""
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= num_experts):
        raise ValueError(f"expert ids from {ids.min()} to {ids.max()} for {num_experts} experts")
    # -1 becomes the largest value of the unsigned type: the flag.
    return ids.astype(route_dtype(num_experts))


def signed_routes(routes: NDArray[np.integer]) -> NDArray[np.int32]:
    """Expert ids with -1 for missing, of a ``RouteArray`` (or of ids that are signed already)."""
    signed = routes.astype(np.int32)
    if routes.dtype.kind == "u":
        signed[routes == np.iinfo(routes.dtype).max] = -1
    return signed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled.

    Log-probs that come back are those of the *sampling distribution*: logits divided by ``temperature``, masked by
    top-k, top-p and min-p, renormalised. ``temperature`` 0 means greedy; its log-probs are those at temperature 1.
    ``seed`` fixes the random stream of this request, whatever else is in the batch.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to sample. Requests with equal ``prompt_tokens`` share one prefill."""

    request_id: str
    prompt_tokens: IntArray  # [P]
    sampling: SamplingParams
    want_routes: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one request. All arrays have the length of ``tokens``: there is no synthetic token.

    A stop token is part of ``tokens`` (it was sampled); a stop string ends the completion after the token that
    completed it. ``routes`` [P + n - 1, L, K] holds expert ids for every position whose forward ran, flagged as missing
    where the position was served from a cache that kept no ids.
    """

    request_id: str
    tokens: IntArray  # [n]
    logprobs: FloatArray  # [n]
    versions: IntArray  # [n] policy version that sampled the token
    kv_versions: IntArray  # [n] oldest version among the cached keys and values that it attended to
    finish_reason: FinishReason
    routes: RouteArray | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """One training sequence: prompt, sampled and tool tokens in order. Text is never re-tokenised for training.

    Example, prompt of two tokens and three sampled ones::

        Sequence("r0/0", tokens=[5, 9, 7, 7, 2], loss_mask=[0, 0, 1, 1, 1],
                 logprobs=[0, 0, -0.1, -2.3, -0.7], versions=[-1, -1, 4, 4, 4], kv_versions=[-1, -1, 4, 4, 4])

    ``logprobs[t]`` is the log-prob of ``tokens[t]`` given the tokens before it; it means something where
    ``loss_mask`` is 1.
    """

    sequence_id: str
    tokens: IntArray  # [T]
    loss_mask: BoolArray  # [T] True where the policy sampled the token and it counts
    logprobs: FloatArray  # [T] what the engine reported
    versions: IntArray  # [T]
    kv_versions: IntArray  # [T]
    routes: RouteArray | None = None  # [T-1, L, K] expert ids of the engine, by the position that was fed

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name)) for name in ("tokens", "loss_mask", "logprobs", "versions", "kv_versions")
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"sequence {self.sequence_id}: arrays differ in length: {lengths}")
        if len(self.tokens) and self.loss_mask[0]:
            raise ValueError(f"sequence {self.sequence_id}: the first token has no context and can't be trained on")
        self._check_routes()

    def _check_routes(self) -> None:
        """Nothing is cut, padded or widened here: ids of another length belong to another sequence."""
        routes = self.routes
        if routes is None:
            return
        if routes.ndim != 3 or len(routes) != len(self.tokens) - 1:
            raise ValueError(
                f"sequence {self.sequence_id}: expert ids have shape {routes.shape}; {len(self.tokens)} tokens need "
                f"[{len(self.tokens) - 1}, layers, experts per token]"
            )
        if routes.dtype not in (np.uint8, np.uint16):
            raise ValueError(
                f"sequence {self.sequence_id}: expert ids are {routes.dtype}, expected uint8 or uint16 (compact_routes)"
            )


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt of a task. ``prompt`` is plain text or chat messages; ``row`` is what the reward may need."""

    problem_id: str
    prompt: str | tuple[dict[str, object], ...]
    answer: str | None
    row: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and its parts. ``reward`` None: every reward function abstained; the rollout leaves the baseline.

    ``correct`` is the raw task metric (used by dynamic sampling and accuracy), ``formatted`` whether the answer had
    the asked form; None where the task has no such notion. ``error`` says why a grader failed.
    """

    reward: float | None
    correct: bool | None = None
    formatted: bool | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample of a group. Several sequences (turns with a rewritten history, leaves of a tree) count once."""

    rollout_id: str
    group_id: str
    problem: Problem
    sequences: tuple[Sequence, ...]
    text: str
    score: Score
    status: RolloutStatus
    replica: int = 0

    @property
    def num_sampled_tokens(self) -> int:
        """len_i: tokens that count, over all sequences of the rollout."""
        return int(sum(int(s.loss_mask.sum()) for s in self.sequences))


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """A sequence as the trainer sees it. All arrays [T]; values matter where ``loss_mask`` is True.

    ``loss_mask`` is the sequence's own mask after truncation policy and rejections. ``weights`` are detached
    correction weights. ``old_logprobs`` None means on-policy: the anchor of the ratio is the detached live log-prob.
    """

    sequence: Sequence
    rollout_id: str
    loss_mask: BoolArray
    advantages: FloatArray
    old_logprobs: FloatArray | None = None
    ref_logprobs: FloatArray | None = None
    weights: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step sees, whole: denominators are counted over it, never over a micro-batch or a rank.

    ``denominator_tokens`` and ``denominator_rollouts`` override the counts of the masks (rejection with
    ``denominator = "fixed"``).
    """

    items: tuple[TrainSequence, ...]
    denominator_tokens: int | None = None
    denominator_rollouts: int | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of a forward-backward: the loss, the log-probs [T] per sequence of that very forward, and metrics.

    Log-probs are float32 of the sampling distribution and finite or not as the model gave them: nothing is zeroed.
    Positions where nothing was computed hold NaN only outside the sequence's ``loss_mask``. ``routes`` [T-1, L, K]:
    the experts that the trainer's own routers chose in it, for sequences that carry the engine's.
    """

    loss: float
    logprobs: dict[str, FloatArray]
    metrics: dict[str, float]
    num_micro_batches: int
    num_forward_tokens: int
    routes: dict[str, RouteArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimOutput:
    """Result of an optimizer step: the new policy version, gradient norm before clipping, learning rate used.

    ``grad_norm`` None: nothing had a gradient, so that no weight moved.
    """

    version: int
    grad_norm: float | None
    learning_rate: float


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a manifest, under its checkpoint name.

    ``group`` names the atomic group (tensors that an engine fuses at load) that a transfer must not split.
    ``trainable`` False: frozen weights and policy buffers, which travel all the same. A quantised tensor names in
    ``scale`` the tensor that holds its block scales, a member of the same group.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # "bfloat16", "float32", "float8_e4m3fn", …
    group: str
    trainable: bool = True
    scale: str = ""


@dataclass(frozen=True, slots=True)
class Original:
    """A source's tensor before its name was translated, and the translated ones that lie in it: together all of it.

    ``parts``: their names, and where they lie if the tensor is contiguous, as size, stride and offset in elements.
    """

    spec: TensorSpec
    parts: tuple[tuple[str, tuple[tuple[int, ...], tuple[int, ...], int]], ...]
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A live tensor of an engine in another process, described without its bytes. ``dtype``: torch's word. ``digest``:
    of its bytes under the key that was asked for (``numerics.row_sums.tensor_digest``), None without a key."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str | None = None


Naming = Literal["module", "checkpoint"]
"""Whose tensor names: those of transformers' modules (fused expert stacks), or those of published checkpoints (one
tensor per expert and projection), which engines' own loaders read."""


Quantisation = Literal["none", "fp8", "fp8_ue8m0", "mxfp4_experts"]
"""How an engine's weights are quantised: fp8 in 128 × 128 blocks with float32 or power-of-two scales; or the experts
in mxfp4."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a refit will bring: every tensor in order, once (tied tensors travel once, under their first name).

    ``version`` is the policy version of the weights. ``tied`` maps further names to the name that travels.
    ``model_type`` is transformers' word for the architecture (``qwen3_moe``), by which the name map is chosen.
    ``base_version`` is set for a declared subset (a delta, an adapter, a frozen tower): it may only be laid over
    weights of exactly that version. ``quantisation`` names the scheme of its quantised tensors, "none" if it has none.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    tied: dict[str, str] = field(default_factory=dict)
    model_type: str = ""
    naming: Naming = "module"
    base_version: int | None = None
    quantisation: Quantisation = "none"


ClaimStatus = Literal["held", "failed", "not checked"]


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement of a refit's receipt. ``detail`` says how much was compared, what differs, or why it was not
    looked at."""

    name: str
    status: ClaimStatus
    detail: str


@dataclass(frozen=True, slots=True)
class DerivedReport:
    """What one entry of the derived-state registry found: of ``num_states`` tensors (maps, caches, scales) that it
    owns in the engine, ``num_changed`` held other values than a rebuild from the live weights gives.

    "repaired 12 of 86" and "0 changed" are different facts: a copy that changed nothing is not a repair.
    """

    entry: str
    num_states: int
    num_changed: int
    detail: str = ""
