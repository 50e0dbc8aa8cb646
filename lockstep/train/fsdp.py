"""The trainer: micro-batched forward-backward, AdamW over float32 masters, checkpoints.

One rank for now, written so that more follow: whatever belongs to the global batch goes through ``sum_over_ranks``,
and each rank back-propagates D times its share, D the number of ranks whose gradients FSDP averages.

    forward_backward: count N, B over the global batch → plan micro-batches (items without a gradient apart, forward
    only) → forward → log-probs → objective → backward → float32 sums        optim_step: clip → AdamW → round to live
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from lockstep.config.schema import TrainerConfig
from lockstep.hardware.allocator import keep_freed_pages
from lockstep.interfaces import LogProbs, LossTokens, Objective
from lockstep.model.architectures import freeze_untrained
from lockstep.model.load import ModelError, torch_dtype
from lockstep.model.weights import ModelWeights
from lockstep.records import Batch, FloatArray, OptimOutput, RouteArray, Sequence, StepOutput, TrainSequence
from lockstep.spans import span
from lockstep.train.checkpoint import load_tensors, save_tensors
from lockstep.train.forward import PolicyForward, by_sequence
from lockstep.train.optimizer import MasterOptimizer
from lockstep.train.packing import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def num_ranks() -> int:
    """Ranks over which FSDP averages gradients; 1 without torch.distributed."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def sum_over_ranks(values: Seq[float]) -> list[float]:
    """Elementwise sum over all ranks that hold different tokens; the values themselves on a single rank."""
    if num_ranks() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return total.tolist()


@dataclass(frozen=True, slots=True)
class _Counts:
    """Denominators of the global optimizer batch, and len_i by rollout."""

    num_tokens: int
    num_rollouts: int
    tokens_per_rollout: Counter[str]


class FsdpTrainer:
    """Implements ``interfaces.Trainer`` over ``model``, a module of its own in ``config.dtype``.

    ``temperature`` is the sampling temperature that log-probs are of; ``vocab_limit`` masks head rows beyond the
    tokenizer. The learning rate follows ``config`` over ``total_optimizer_steps``. Log-probs of ``forward_backward``
    and ``logprobs`` come from the same code in the same layouts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        total_optimizer_steps: int,
        temperature: float,
        vocab_limit: int | None = None,
    ) -> None:
        if model.dtype != torch_dtype(config.dtype):
            raise ValueError(f"the model is {model.dtype}, trainer.dtype is {config.dtype}: load it in that dtype")
        if model.device.type == "cpu":
            keep_freed_pages()
        self.model = model.eval()
        self.config = config
        self.frozen = freeze_untrained(model, model.config)
        if config.gradient_checkpointing:
            _enable_checkpointing(model)
        self.forward = PolicyForward(
            model,
            temperature=temperature,
            vocab_limit=vocab_limit,
            micro_batch_tokens=config.micro_batch_tokens,
            chunk_tokens=config.logprob_chunk_tokens,
            packing=config.packing,
            routing_replay=config.routing_replay,
        )
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = MasterOptimizer(trainable, config, total_optimizer_steps)
        self._version = 0
        self._batch_pending = False

    @property
    def version(self) -> int:
        """Policy version of the live weights."""
        return self._version

    def forward_backward(self, batch: Batch, objective: Objective) -> StepOutput:
        """Gradient of the batch's loss, and the log-probs of every sampled token from that very forward.

        Items whose gradient is zero by ``objective.needs_gradient`` run forward only. A batch without a counted token
        has loss 0, no gradient, and the metric ``empty_batch``. Raises RuntimeError if the previous batch's gradients
        were neither used nor dropped.
        """
        if self._batch_pending:
            raise RuntimeError("forward_backward was called twice without optim_step or drop_gradients in between")
        _check_items(batch.items)
        counts = _count(batch)
        trained = [objective.needs_gradient(item) and bool(item.loss_mask.any()) for item in batch.items]
        logprobs = {
            item.sequence.sequence_id: np.full(len(item.sequence.tokens), np.nan, dtype=np.float32)
            for item in batch.items
        }
        loss, sums = 0.0, defaultdict(float)
        routes: dict[str, RouteArray] = {}
        without_ids = [0, 0]  # (token, layer) pairs that the trainer routes itself, and those that are replayed
        num_micro_batches = num_forward_tokens = 0
        with self.optimizer.accumulating():
            for with_gradient in (True, False):
                items = [item for item, flag in zip(batch.items, trained, strict=True) if flag is with_gradient]
                sequences = [item.sequence for item in items]
                record = any(sequence.routes is not None for sequence in sequences)
                wanted = [self.forward.wanted(sequence, sequence.loss_mask) for sequence in sequences]
                for each in wanted:
                    if each.routes is not None:
                        num_missing = int((each.routes[..., 0] < 0).sum())
                        without_ids[0] += num_missing
                        without_ids[1] += each.routes[..., 0].size - num_missing
                for micro in self.forward.plan(wanted):
                    with self.forward.running(micro, sequences, wanted, record_routes=record) as records:
                        loss += self._run(micro, items, objective, counts, with_gradient, logprobs, sums)
                        routes.update(self.forward.routes_of(micro, sequences, records))
                    num_micro_batches += 1
                    num_forward_tokens += self.forward.num_tokens(micro)
        self._batch_pending = True
        names = sorted(sums)
        loss, *totals = sum_over_ranks([loss, *(sums[name] for name in names)])
        metrics = {name: total / counts.num_tokens for name, total in zip(names, totals, strict=True)}
        if counts.num_tokens == 0:
            metrics = {"empty_batch": 1.0}
        if self.config.routing_replay:
            missing, known = sum_over_ranks(without_ids)
            metrics |= {"routing_replay/missing": missing / (missing + known)} if missing + known else {}
        return StepOutput(loss, logprobs, metrics, num_micro_batches, num_forward_tokens, routes)

    def _run(
        self,
        micro: MicroBatch,
        items: list[TrainSequence],
        objective: Objective,
        counts: _Counts,
        with_gradient: bool,
        logprobs: dict[str, FloatArray],
        sums: dict[str, float],
    ) -> float:
        """One micro-batch: fills ``logprobs``, adds to ``sums``, returns its share of the loss."""
        with nullcontext() if with_gradient else torch.no_grad():
            with span("forward"):
                live = self.forward(micro).logprobs
            values = live.detach().cpu().numpy()
            for index, positions, where in by_sequence(micro):
                logprobs[items[index].sequence.sequence_id][positions] = values[where.numpy()]
            tokens = _loss_tokens(micro, items, live, counts)
            if tokens is None:
                return 0.0
            output = objective(tokens)
        if with_gradient:
            with span("backward"):
                (output.loss * num_ranks()).backward()
        for name, value in output.sums.items():
            sums[name] += float(value)
        return float(output.loss.detach())

    def optim_step(self) -> OptimOutput:
        """Move the weights by the gradients of the last ``forward_backward``; the version rises by one.

        If no item had a gradient the weights and Adam's state stay, and only version and schedule go on. Raises
        GradientError if the gradient norm isn't finite: the weights are as before and the gradients dropped.
        """
        if not self._batch_pending:
            raise RuntimeError("optim_step without a forward_backward before it")
        self._batch_pending = False
        with span("optimizer"):
            try:
                result = self.optimizer.step()
            finally:
                self.optimizer.drop_gradients()
        self._version += 1
        return OptimOutput(self._version, result.grad_norm, result.learning_rate)

    def drop_gradients(self) -> None:
        """Forget accumulated gradients (the gate stopped the step)."""
        self.optimizer.drop_gradients()
        self._batch_pending = False

    def logprobs(
        self,
        sequences: Seq[Sequence],
        *,
        positions: Literal["sampled", "all"] = "sampled",
        top1: bool = False,
        routes: bool = False,
        replay: bool = True,
    ) -> dict[str, LogProbs]:
        """Log-probs under the live weights, without a gradient; see ``PolicyForward.score``. ``replay`` False: the
        model's own routers decide, even if training replays the engine's."""
        with span("forward/logprobs"), nullcontext() if replay else self.forward.own_routes():
            return self.forward.score(sequences, self._version, positions=positions, top1=top1, routes=routes)

    def weights(self) -> ModelWeights:
        """The live weights at the current version."""
        return ModelWeights(self.model, self._version)

    def save(self, path: Path) -> None:
        """Write masters, Adam's state, policy buffers, step and version into the folder ``path``."""
        save_tensors(path, self._state())

    def checkpoint_bytes(self) -> int:
        """Size of what ``save`` writes, without the format's own overhead."""
        return sum(tensor.nbytes for tensor in self._state().values())

    def load(self, path: Path) -> None:
        """Restore what ``save`` wrote, so that the next step equals the uninterrupted run's bit for bit.

        Raises TrainerStateError, before anything changes, if names, shapes or dtypes differ in either direction.
        """
        state = self._state()
        load_tensors(path, state)
        self._version = int(state["progress/version"])
        self.optimizer.num_steps = int(state["progress/step"])
        self.optimizer.refresh_live()
        self.drop_gradients()

    def _state(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.tensors()
        trained = self.optimizer.live
        for name, _, _, tensor in self.weights().shards():
            if name not in trained:
                state[f"frozen/{name}"] = tensor
        state["progress/version"] = torch.tensor(self._version)
        state["progress/step"] = torch.tensor(self.optimizer.num_steps)
        return state


def _check_items(items: Seq[TrainSequence]) -> None:
    seen: set[str] = set()
    for item in items:
        name = item.sequence.sequence_id
        if name in seen:
            raise ValueError(f"sequence {name} is in the batch twice")
        seen.add(name)
        if bool((item.loss_mask & ~item.sequence.loss_mask).any()):
            raise ValueError(f"sequence {name}: its loss mask counts tokens that no policy sampled")
    if len({item.ref_logprobs is None for item in items if item.loss_mask.any()}) > 1:  # masked whole: needs none
        raise ValueError("some sequences of the batch have reference log-probs and some have none")


def _count(batch: Batch) -> _Counts:
    lengths: Counter[str] = Counter()
    for item in batch.items:
        lengths[item.rollout_id] += int(item.loss_mask.sum())
    own = (sum(lengths.values()), sum(1 for length in lengths.values() if length))
    tokens = batch.denominator_tokens if batch.denominator_tokens is not None else own[0]
    rollouts = batch.denominator_rollouts if batch.denominator_rollouts is not None else own[1]
    num_tokens, num_rollouts = sum_over_ranks([tokens, rollouts])
    return _Counts(int(num_tokens), int(num_rollouts), lengths)


def _loss_tokens(
    micro: MicroBatch, items: list[TrainSequence], live: torch.Tensor, counts: _Counts
) -> LossTokens | None:
    """The counted tokens of a micro-batch, sequence by sequence; None if there are none."""
    chosen: list[np.ndarray] = []
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    num_sequences = 0
    for index, positions, where in by_sequence(micro):
        item = items[index]
        counted = item.loss_mask[positions]
        places, kept = positions[counted], where.numpy()[counted]
        if len(places) == 0:
            continue
        size = len(places)
        chosen.append(kept)
        # NaN marks tokens whose anchor is the live log-prob itself.
        columns["old"].append(np.full(size, np.nan) if item.old_logprobs is None else item.old_logprobs[places])
        columns["anchored"].append(np.full(size, item.old_logprobs is not None))
        columns["rollout"].append(item.sequence.logprobs[places])
        columns["advantages"].append(item.advantages[places])
        columns["weights"].append(np.ones(size) if item.weights is None else item.weights[places])
        columns["sequence_index"].append(np.full(size, num_sequences))
        columns["lengths"].append(np.full(size, counts.tokens_per_rollout[item.rollout_id]))
        if item.ref_logprobs is not None:
            columns["reference"].append(item.ref_logprobs[places])
        num_sequences += 1
    if not chosen:
        return None

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(columns[name])).to(live.device, dtype)

    logprobs = live[torch.from_numpy(np.concatenate(chosen)).to(live.device)]
    return LossTokens(
        logprobs=logprobs,
        old=torch.where(column("anchored", torch.bool), column("old"), logprobs.detach()),
        rollout=column("rollout"),
        advantages=column("advantages"),
        weights=column("weights"),
        reference=column("reference") if columns["reference"] else None,
        sequence_index=column("sequence_index", torch.int64),
        num_sequences=num_sequences,
        tokens_per_rollout=column("lengths"),
        num_tokens=counts.num_tokens,
        num_rollouts=counts.num_rollouts,
    )


def _enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute layers in the backward. Only the layers' own switch is on: dropout and the like stay in eval mode.
    Raises ModelError for a model without layers that can."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ModelError(
            f"trainer.gradient_checkpointing: {type(model).__name__} has no layers that support it; set it to false"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True
