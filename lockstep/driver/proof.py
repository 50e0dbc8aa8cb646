"""The ``behaves`` claim within a run: the trainer is the reference, its bound on mean differences the recipe's.

A run's first refit gives the engine *other* weights on purpose, and its second the policy's: without a difference
between them neither check would have power. What the probes showed is filed with each receipt.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from lockstep.config.schema import BoundConfig
from lockstep.interfaces import Engine, LogProbs, WeightSource
from lockstep.model.adapter import num_experts, routers
from lockstep.refit.behaves import Behaviour
from lockstep.refit.probes import OtherWeights, Probes, holding, indexer_tokens, make_probes
from lockstep.refit.quantised import served_weights
from lockstep.spans import span
from lockstep.train.fsdp import FsdpTrainer

MEAN = "abs_diff/mean"

BFLOAT16_PROBES = 3.0
"""How much coarser than the sampled tokens, which the gate's bound is for, probes may be in bfloat16: random tokens are
improbable, and rounding moves an improbable token's log-prob further. The quickstart's probes differ by 0.10 to 0.13 on
a CPU without AMX, where an engine has no noise of its own that would widen the bound of 0.07."""


class RefitProof:
    """Makes the probes when they are first needed, and the checks of single refits from them.

    ``longest``: tokens that the engine takes, where that is less than the model's context. ``in_bfloat16``: one side at
    least computes in it.
    """

    def __init__(
        self,
        trainer: FsdpTrainer,
        engine: Engine,
        bounds: Seq[BoundConfig],
        *,
        vocab_limit: int,
        longest: int | None = None,
        in_bfloat16: bool = False,
    ) -> None:
        self._trainer, self._engine, self._vocab_limit, self._longest = trainer, engine, vocab_limit, longest
        self._coarser = BFLOAT16_PROBES if in_bfloat16 else 1.0
        self._bound = next((bound for bound in bounds if bound.metric == MEAN), None)
        self._probes: Probes | None = None

    @property
    def possible(self) -> bool:
        """Whether the run has a bound that probes can be held to."""
        return self._bound is not None

    def of_policy(self) -> Behaviour | None:
        """The check of a refit with the trainer's weights; None without a bound. Has scored the engine already."""
        if self._engine.receiver().quantisation == "none":
            return self._check(self._alone)
        return self._of(self._trainer.weights())

    def of_other(self, other: OtherWeights) -> Behaviour | None:
        """The same of a refit with ``other`` weights: the trainer computes with them while it scores."""
        return self._of(other)

    def _of(self, source: WeightSource) -> Behaviour | None:
        """The trainer computes with the source's weights while it scores, quantised and dequantised as the engine's."""
        served = served_weights(source, self._engine.receiver().quantisation)

        def reference(sequences: Any) -> Any:
            with holding(self._trainer.model, served):
                return self._alone(sequences)

        return self._check(reference)

    def _alone(self, sequences: Any) -> dict[str, LogProbs]:
        """Each probe by itself: what packing or padding does is the gate's to judge, not the refit's."""
        return {
            name: one
            for sequence in sequences
            for name, one in self._trainer.logprobs([sequence], replay=False).items()
        }

    def _check(self, reference: Any) -> Behaviour | None:
        if self._bound is None:
            return None
        if self._probes is None:
            with span("refit/probes"):
                self._probes = self._make()
        bound = self._bound
        behaviour = Behaviour(
            self._probes,
            self._engine.score,
            reference,
            bound=self._coarser * bound.bound,
            bound_of=f"{f'{self._coarser:g} times ' if self._coarser != 1 else ''}the gate's on {bound.metric}",
        )
        with span("refit/before"):
            behaviour.before()
        return behaviour

    def _make(self) -> Probes:
        model = self._trainer.model
        config: Any = model.config.get_text_config()
        has_experts = bool(routers(model))
        contexts = (getattr(config, "max_position_embeddings", None), self._longest)
        return make_probes(
            lambda sequences: self._trainer.logprobs(sequences, routes=has_experts, replay=False),
            vocab_size=self._vocab_limit,
            num_experts=num_experts(model) if has_experts else 0,
            context=min((one for one in contexts if one is not None), default=None),
            model_type=config.model_type,
            indexer_tokens=indexer_tokens(config),
            padding_id=config.pad_token_id,
        )
