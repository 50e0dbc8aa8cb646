"""Passes of models over a batch's tokens beside the training forward: only those that a setting needs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from lockstep.agreement import self_difference
from lockstep.driver.assembly import Parts
from lockstep.interfaces import LogProbs
from lockstep.records import Batch, Rollout, TrainSequence
from lockstep.spans import span
from lockstep.train.advantages import prepare
from lockstep.train.corrections import Corrected, apply_corrections, needs_extra_pass

NUM_SELF_CHECK_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class ModelScores:
    """Log-probs by sequence id; None where no setting needs them."""

    live: Mapping[str, LogProbs] | None
    reference: Mapping[str, LogProbs] | None
    teacher: Mapping[str, LogProbs] | None


def score_models(parts: Parts, rollouts: Seq[Rollout]) -> ModelScores:
    """The extra passes of this step."""
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    record = parts.config.rollout.record_routes
    with span("logprobs"):
        return ModelScores(
            live=parts.trainer.logprobs(sequences, routes=record) if needs_extra_pass(parts.algorithm) else None,
            reference=parts.reference.logprobs(sequences) if parts.reference else None,
            teacher=parts.teacher.logprobs(sequences) if parts.teacher else None,
        )


@dataclass(frozen=True, slots=True)
class OptimizerParts:
    """What each optimizer step of a batch trains on, in order, and the metrics of the rewards' preparation."""

    steps: tuple[Corrected, ...]
    metrics: Mapping[str, float]

    def batches(self) -> list[Batch]:
        """One batch for each optimizer step."""
        return [Batch(one.items, one.denominator_tokens, one.denominator_rollouts) for one in self.steps]


def optimizer_parts(parts: Parts, rollouts: Seq[Rollout], scores: ModelScores) -> OptimizerParts:
    """Rewards to advantages, the batch cut into its optimizer steps, corrections applied to each."""
    config = parts.algorithm
    prepared = prepare(
        rollouts,
        config,
        max_new_tokens=parts.config.rollout.max_new_tokens,
        teacher=scores.teacher,
        reference=scores.reference,
        live=scores.live,
    )
    split = split_for_optimizer(prepared.items, config.optimizer_steps_per_batch)
    corrected = tuple(apply_corrections(items, scores.live, config.corrections) for items in split)
    return OptimizerParts(corrected, prepared.metrics)


def self_agreement(parts: Parts, rollouts: Seq[Rollout]) -> dict[str, float]:
    """The trainer against itself: some sequences together and each alone, so packed differently (``self/…``)."""
    with_sequences = [rollout for rollout in rollouts if rollout.sequences]  # one that only failed has none
    sequences = [rollout.sequences[0] for rollout in with_sequences[:NUM_SELF_CHECK_SEQUENCES]]
    if not sequences:
        return {}
    with span("logprobs/self"):
        together = parts.trainer.logprobs(sequences)
        alone = [parts.trainer.logprobs([sequence])[sequence.sequence_id] for sequence in sequences]
    return self_difference(
        [together[sequence.sequence_id].logprobs for sequence in sequences],
        [logprobs.logprobs for logprobs in alone],
        [sequence.loss_mask for sequence in sequences],
    )


def split_for_optimizer(items: Seq[TrainSequence], num_steps: int) -> list[tuple[TrainSequence, ...]]:
    """``items`` in ``num_steps`` parts of whole rollouts, in order, as even as possible; empty parts are left out."""
    rollout_ids = list(dict.fromkeys(item.rollout_id for item in items))
    part_of = {rollout_id: index * num_steps // len(rollout_ids) for index, rollout_id in enumerate(rollout_ids)}
    parts = [tuple(item for item in items if part_of[item.rollout_id] == part) for part in range(num_steps)]
    return [part for part in parts if part]
