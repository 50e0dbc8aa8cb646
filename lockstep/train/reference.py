"""A frozen model that scores sequences: the reference of the KL, or a teacher to distil from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from lockstep.interfaces import LogProbs
from lockstep.records import Sequence
from lockstep.train.forward import Packing, PolicyForward

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ReferenceScorer:
    """Implements ``interfaces.Scorer`` by the trainer's own forward over ``model``, which is frozen here.

    ``temperature`` and ``vocab_limit`` must be the policy's: a KL compares sampling distributions. ``version`` is
    what its log-probs carry (0: the policy before training). Build one only where a KL or a teacher is configured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        vocab_limit: int | None = None,
        micro_batch_tokens: int = 4096,
        chunk_tokens: int = 512,
        packing: Packing = "auto",
        version: int = 0,
    ) -> None:
        model.requires_grad_(False)
        model.eval()
        self.version = version
        self._forward = PolicyForward(
            model,
            temperature=temperature,
            vocab_limit=vocab_limit,
            micro_batch_tokens=micro_batch_tokens,
            chunk_tokens=chunk_tokens,
            packing=packing,
        )

    def logprobs(self, sequences: Seq[Sequence]) -> dict[str, LogProbs]:
        """Log-probs of every sequence's sampled tokens, NaN elsewhere."""
        return self._forward.score(sequences, self.version)
