"""The embedded rollout engine: continuous batching in the trainer's process, over transformers models.

    generate(request) ─► Scheduler.submit ─► driver task: Scheduler.step() while there is work ─► Completion
    receiver().begin … commit ─► running requests go back to the queue, weights are copied, caches dropped, resume

The engine owns its module: a refit copies into that module's storage (or aliases it, for the ``shared`` transport), and
what the decoder derives from it is rebuilt at the commit. Tokens carry the version that sampled them and the version
of the cache they attended to; a cache never outlives a change of weights.

One request that can't be run (an empty prompt, an id outside the vocabulary, no room in the context, logits with NaN)
comes back alone as a completion with ``finish_reason="failed"``. An exception inside a step is a fault of the engine:
it is raised to every caller whose request was in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal

import numpy as np

from lockstep.config.schema import RolloutConfig
from lockstep.hardware.allocator import keep_freed_pages
from lockstep.interfaces import LogProbs
from lockstep.records import Completion, GenerateRequest, SamplingParams, Sequence
from lockstep.rollout.decoding import Decoder
from lockstep.rollout.fast_decoder import FastDecoder, unsupported
from lockstep.rollout.module_decoder import ModuleDecoder
from lockstep.rollout.random_stream import as_seed
from lockstep.rollout.receiver import TorchReceiver
from lockstep.rollout.scheduler import EngineStats, Running, Scheduler
from lockstep.rollout.scoring import score_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EngineError(RuntimeError):
    """A step of the engine raised; the cause is chained."""


class EngineUnfit(RuntimeError):
    """The engine's weights may be a mixture, or are being replaced: it serves nothing until a refit commits."""


class TorchEngine:
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
        self._text_config = model.config.get_text_config()
        self._stop_token_ids = stop_token_ids
        self._vocabulary = vocab_limit or self._text_config.vocab_size
        self._context: int | None = getattr(self._text_config, "max_position_embeddings", None)
        self.decoder: Decoder = make_decoder(model, config, vocab_limit)
        self._scheduler = Scheduler(
            self.decoder,
            num_slots=config.num_slots,
            prefill_tokens=config.prefill_tokens,
            decode_text=decode,
            version=version,
        )
        self._receiver = TorchReceiver(model, self.decoder, self)
        self._requests: dict[str, Running] = {}
        self._pauses: set[Literal["caller", "refit"]] = set()
        self._unfit: str | None = None
        self._driver: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- Engine -------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Policy version of the weights that it serves."""
        return self._scheduler.version

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return self._scheduler.stats

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises EngineUnfit, EngineError, or ValueError if the request id is in flight."""
        self._check_fit()
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is already in flight")
        problem = self._problem(request)
        if problem is not None:
            self.stats.num_failed += 1
            return _refusal(request, problem)
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = self._loop.create_future()
        entry = self._entry(request, future)
        self._requests[request.request_id] = entry
        self._scheduler.submit(entry)
        self._wake()
        try:
            return await future
        finally:
            del self._requests[request.request_id]
            if future.cancelled():
                self._scheduler.take([entry])

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Complete requests with what they have sampled so far; ids that aren't in flight are ignored."""
        self._scheduler.abort([self._requests[one] for one in request_ids if one in self._requests])

    def score(self, sequences: Seq[Sequence], path: Literal["prefill", "decode"] = "prefill") -> dict[str, LogProbs]:
        """Log-probs of given tokens at the engine's temperature, by one prefill or token by token over a cache of
        their own. Raises EngineUnfit during or after a broken refit, ValueError for a sequence without tokens."""
        self._check_fit()
        if "refit" in self._pauses:
            raise EngineUnfit("a refit is in progress: the weights are a mixture of two versions")
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

    def pause(self, mode: Literal["finish", "abort", "keep"] = "finish") -> None:
        """Stop admission; nothing decodes when this returns.

        ``finish`` decodes what runs to its end first, ``abort`` completes it as it is, ``keep`` puts it back in the
        queue: after ``resume`` it is prefilled again with what it has sampled. Requests that only wait go on waiting.
        """
        self._pauses.add("caller")
        if mode == "finish":
            while self._scheduler.running:
                self._step(admit=False)
        elif mode == "abort":
            self._scheduler.abort(self._scheduler.running)
        else:
            self._scheduler.requeue_running()

    def resume(self) -> None:
        """Admit again."""
        self._pauses.discard("caller")
        self._wake()

    def receiver(self) -> TorchReceiver:
        """The engine's side of a refit. Requests that run when it begins are kept, as in ``pause("keep")``."""
        return self._receiver

    # --- RefitHost ----------------------------------------------------------------------------------------------------

    def refit_begun(self) -> None:
        """See ``RefitHost``."""
        self._pauses.add("refit")
        self._scheduler.requeue_running()

    def refit_committed(self, version: int) -> None:
        """See ``RefitHost``. A pause that the caller asked for stays until ``resume``."""
        self._scheduler.drop_caches()
        self._scheduler.version = version
        self._unfit = None
        self._pauses.discard("refit")
        self._wake()

    def refit_aborted(self, reason: str) -> None:
        """See ``RefitHost``."""
        self._unfit = reason
        self._pauses.discard("refit")
        self._scheduler.fail_all(EngineUnfit(f"the engine is unfit: {reason}"))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_fit(self) -> None:
        if self._unfit is not None:
            raise EngineUnfit(f"the engine is unfit until a refit commits: {self._unfit}")

    def _entry(self, request: GenerateRequest, future: asyncio.Future[Completion]) -> Running:
        def deliver(completion: Completion) -> None:
            if not future.done():
                future.set_result(completion)

        def fail(error: BaseException) -> None:
            if not future.done():
                future.set_exception(error)

        room = request.sampling.max_new_tokens
        if self._context is not None:
            room = min(room, self._context - len(request.prompt_tokens))
        return Running(
            request=request,
            max_new_tokens=room,
            deliver=deliver,
            fail=fail,
            stop_ids=frozenset((*self._stop_token_ids, *request.sampling.stop_token_ids)),
            seed=as_seed(request.sampling.seed),
        )

    def _problem(self, request: GenerateRequest) -> str | None:
        """Why this request can't be run, or None."""
        prompt = request.prompt_tokens
        if prompt.ndim != 1 or not len(prompt):
            return f"the prompt must be a vector of at least one token id, its shape is {prompt.shape}"
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocabulary:
            return f"prompt ids run from {prompt.min()} to {prompt.max()}, the vocabulary has {self._vocabulary}"
        if self._context is not None and len(prompt) >= self._context:
            return f"the prompt has {len(prompt)} tokens, the model's context is {self._context}: no room for an answer"
        if request.sampling.stop_strings and self._scheduler.decode_text is None:
            return "stop strings need an engine made with decode="
        return _sampling_problem(request.sampling)

    def _wake(self) -> None:
        """Start the driver if there is work and nothing forbids it."""
        if self._pauses or self._loop is None or self._loop.is_closed() or not self._scheduler.has_work:
            return
        if self._driver is None or self._driver.done():
            self._driver = self._loop.create_task(self._drive())

    async def _drive(self) -> None:
        while self._scheduler.has_work and not self._pauses:
            try:
                self._step(admit=True)
            except EngineError:
                return  # every caller in flight has it
            await asyncio.sleep(0)

    def _step(self, *, admit: bool) -> None:
        try:
            self._scheduler.step(admit=admit)
        except Exception as cause:
            error = EngineError(f"a step of the rollout engine failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            self._scheduler.fail_all(error)
            raise error from cause


def make_decoder(model: PreTrainedModel, config: RolloutConfig, vocab_limit: int | None) -> Decoder:
    """The decoder for ``model``: hand-written where there is one and ``fast_path`` allows, else its own modules."""
    if config.fast_path == "auto" and unsupported(model) is None:
        return FastDecoder(model, vocab_limit)
    return ModuleDecoder(model, vocab_limit)


def _sampling_problem(sampling: SamplingParams) -> str | None:
    checks = [
        (sampling.max_new_tokens >= 1, f"max_new_tokens must be at least 1, it is {sampling.max_new_tokens}"),
        (0 <= sampling.temperature < float("inf"), f"temperature must be finite and ≥ 0, it is {sampling.temperature}"),
        (sampling.top_k >= 0, f"top_k must be at least 0, it is {sampling.top_k}"),
        (0 < sampling.top_p <= 1, f"top_p must be in (0, 1], it is {sampling.top_p}"),
        (0 <= sampling.min_p < 1, f"min_p must be in [0, 1), it is {sampling.min_p}"),
        ("" not in sampling.stop_strings, "an empty stop string would stop at once"),
    ]
    return next((text for holds, text in checks if not holds), None)


def _refusal(request: GenerateRequest, problem: str) -> Completion:
    nothing = np.empty(0, dtype=np.int32)
    return Completion(
        request.request_id, nothing, np.empty(0, dtype=np.float32), nothing, nothing, "failed", error=problem
    )
