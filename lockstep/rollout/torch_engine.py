"""The embedded rollout engine: continuous batching in the trainer's process, over transformers models.

    generate(request) ─► Scheduler.submit ─► driver task: Scheduler.step() while there is work ─► Completion
    receiver().begin … commit ─► running requests go back to the queue, weights are copied, caches dropped, resume

The engine owns its module: a refit copies into that module's storage (or aliases it, for the ``shared`` transport), and
what the decoder derives from it is rebuilt at the commit. Tokens carry the version that sampled them and the version
of the cache they attended to; a cache never outlives a change of weights.

Requests in flight, pauses and unfitness are those of every engine: see ``queued_engine.py``. Logits with NaN fail their
request alone.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal

from lockstep.config.schema import RolloutConfig
from lockstep.hardware.allocator import keep_freed_pages
from lockstep.interfaces import LogProbs
from lockstep.records import Sequence
from lockstep.rollout.decoding import Decoder
from lockstep.rollout.fast_decoder import FastDecoder, unsupported
from lockstep.rollout.module_decoder import ModuleDecoder
from lockstep.rollout.quantised_receiver import QuantisedReceiver
from lockstep.rollout.queued_engine import EngineError, EngineUnfit, QueuedEngine
from lockstep.rollout.receiver import TorchReceiver
from lockstep.rollout.scheduler import Scheduler
from lockstep.rollout.scoring import score_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["EngineError", "EngineUnfit", "TorchEngine", "make_decoder"]


class TorchEngine(QueuedEngine):
    """``interfaces.Engine`` over a module that the engine owns.

    ``decoder`` is what computes: a ``FastDecoder`` or a ``ModuleDecoder``. ``decode`` (token ids to text) is needed for
    stop strings only, and must keep special tokens, or a stop string that is one never fires. ``vocab_limit`` cuts
    logits beyond the tokenizer's vocabulary; the trainer must cut the same. ``stop_token_ids`` are added to every
    request's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        *,
        decode: Callable[[list[int]], str] | None = None,
        vocab_limit: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        version: int = 0,
    ) -> None:
        model.eval().requires_grad_(False)
        if model.device.type == "cpu":
            keep_freed_pages()  # each step takes and frees logits of some megabytes
        self.config = config
        text_config = model.config.get_text_config()
        self.decoder: Decoder = make_decoder(model, config, vocab_limit)
        scheduler = Scheduler(
            self.decoder,
            num_slots=config.num_slots,
            prefill_tokens=config.prefill_tokens,
            decode_text=decode,
            version=version,
        )
        super().__init__(
            scheduler,
            vocabulary=vocab_limit or text_config.vocab_size,
            context=getattr(text_config, "max_position_embeddings", None),
            stop_token_ids=stop_token_ids,
        )
        self._receiver = QuantisedReceiver(model, self.decoder, self, config.quantisation)

    def score(self, sequences: Seq[Sequence], path: Literal["prefill", "decode"] = "prefill") -> dict[str, LogProbs]:
        """Log-probs of given tokens at the engine's temperature, by one prefill or token by token over a cache of
        their own. Raises EngineUnfit during or after a broken refit, ValueError for a sequence without tokens."""
        self._check_whole()
        for sequence in sequences:
            if not len(sequence.tokens):
                raise ValueError(f"sequence {sequence.sequence_id} has no tokens to score")
        return score_sequences(
            self.decoder,
            sequences,
            path=path,
            temperature=self.config.temperature,
            want_routes=self.config.record_routes,
            max_tokens=self.config.prefill_tokens,
            version=self.version,
        )

    def receiver(self) -> TorchReceiver:
        """The engine's side of a refit. Requests that run when it begins are kept, as in ``pause("keep")``."""
        return self._receiver


def make_decoder(model: PreTrainedModel, config: RolloutConfig, vocab_limit: int | None) -> Decoder:
    """The decoder for ``model``: hand-written where there is one and ``fast_path`` allows, else its own modules."""
    if config.fast_path == "auto" and unsupported(model) is None:
        return FastDecoder(model, vocab_limit)
    return ModuleDecoder(model, vocab_limit)
