"""vLLM as a rollout engine, in this process: token in, token out, refitted through ``VllmReceiver``.

    write_model_folder(model) ──▶ VllmEngine(settings) ──▶ vllm.LLM with random weights
    receiver().begin … commit ──▶ running requests are preempted, weights loaded under checkpoint names, caches reset
    generate / score ──▶ VllmScheduler ──▶ LLMEngine.step, one token for each request

Requests in flight, pauses and unfitness are those of every engine (``queued_engine.py``). Tokens carry the version that
sampled them. A request that is kept over a refit is prefilled again under the new weights, so its caches never mix
versions. Log-probs are of the sampling distribution: after temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Literal

from lockstep.hardware.freed_memory import device_count, not_freed
from lockstep.interfaces import LogProbs
from lockstep.records import GenerateRequest, Sequence
from lockstep.rollout.queued_engine import EngineUnfit, QueuedEngine
from lockstep.rollout.vllm_hooks import ForcedTokens, LogitRule, RouteRecorder, has_batch, model_runner, served_model
from lockstep.rollout.vllm_receiver import VllmReceiver
from lockstep.rollout.vllm_scheduler import VllmScheduler
from lockstep.rollout.vllm_scoring import VllmScorer
from lockstep.rollout.vllm_start import EngineUnavailable, VllmSettings, start_llm, stop_llm

logger = logging.getLogger(__name__)

COLDEST, HOTTEST = 0.01, 2
"""vLLM refuses temperatures above, and silently raises those below that are not 0."""


class VllmEngine(QueuedEngine):
    """``interfaces.Engine`` over an in-process ``vllm.LLM``.

    ``decode`` (token ids to text) is needed for stop strings only, and must keep special tokens. ``derived``: the
    registry of derived state that the receiver refreshes, from outside because it belongs to the refit. ``device``
    ("cpu", "cuda") is refused if vLLM computes elsewhere. Raises EngineUnavailable if vLLM can't be started so.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        decode: Callable[[list[int]], str] | None = None,
        derived: Any = None,
        device: str | None = None,
    ) -> None:
        self.settings = settings
        self.llm = start_llm(settings, device=device)
        model, runner = served_model(self.llm), model_runner(self.llm)
        model_config = self.llm.llm_engine.model_config
        recorder = _recorder(model, runner, self.llm, settings) if settings.record_routes else None
        self._vllm = VllmScheduler(
            self.llm,
            num_slots=settings.num_slots,
            decode_text=decode,
            recorder=recorder,
            version=settings.version,
        )
        super().__init__(
            self._vllm,
            vocabulary=settings.vocab_limit or int(model_config.get_vocab_size()),
            context=int(model_config.max_model_len) - 1,  # the one position more that it was started with
            stop_token_ids=settings.stop_token_ids,
        )
        self._scorer = VllmScorer(
            self._vllm,
            LogitRule(model, settings.vocab_limit),
            None if _replays_traces(self.llm) else _forced(runner),
            temperature=settings.temperature,
            want_routes=settings.record_routes,
        )
        self._receiver = VllmReceiver(self.llm, self, derived, settings.quantisation)
        self._asleep = 0
        self._weights_away = False

    @classmethod
    def from_settings(cls, values: dict[str, Any], **options: Any) -> VllmEngine:
        """From ``VllmSettings.as_dict()``, perhaps from another process; ``options`` as of the class."""
        return cls(VllmSettings.from_dict(values), **options)

    def score(self, sequences: Seq[Sequence], path: Literal["prefill", "decode"] = "prefill") -> dict[str, LogProbs]:
        """Log-probs of given tokens at the engine's temperature, by one prefill or token by token over the cache.

        Raises EngineUnfit during or after a broken refit, and asleep; ValueError for a sequence without tokens or
        longer than the context; RuntimeError while requests are paused, since they would go on beside it.
        """
        self._check_whole()
        if self._asleep and self._can_sleep:
            raise EngineUnfit("the engine sleeps, its memory is given back: wake it first")
        for sequence in sequences:
            if not len(sequence.tokens):
                raise ValueError(f"sequence {sequence.sequence_id} has no tokens to score")
            if self._context is not None and len(sequence.tokens) > self._context:
                raise ValueError(
                    f"sequence {sequence.sequence_id} has {len(sequence.tokens)} tokens, the context is {self._context}"
                )
        if self._pauses and self._vllm.started:
            raise RuntimeError(
                f"{self._vllm.started} paused requests would go on while tokens are scored: resume or abort them first"
            )
        return self._scorer.score(sequences, path)

    def receiver(self) -> VllmReceiver:
        """The engine's side of a refit. Requests that run when it begins are kept, as in ``pause("keep")``."""
        return self._receiver

    # --- sleep --------------------------------------------------------------------------------------------------------

    @property
    def weights_away(self) -> bool:
        """Whether it sleeps and the memory of its weights is given back: nothing can be loaded into them."""
        return self._weights_away

    def sleep(self, level: Literal[1, 2] = 1) -> bool:
        """Give memory back: at level 1 the caches, with the weights moved to the host; at level 2 the weights as well,
        so that nothing is served after the wake until a refit commits, on every platform alike.

        Requests that run are kept. Returns False, and says so in the log, where the platform frees nothing (a CPU), or
        where the device's own count of memory does not fall by what was to be freed.
        """
        self._vllm.requeue_running()
        self._pauses.add("caller")
        if self._pauses & {"refit", "verify"}:
            raise RuntimeError("a refit is not over: its weights would be given back under it")
        already, self._asleep = self._asleep, level
        self._weights_away = self._can_sleep
        freed = self._can_sleep
        if freed:
            held = 0 if already else pausable_bytes()
            problem = not_freed(lambda: self.llm.sleep(level=level), held, device_count())
            if problem is not None:
                logger.warning("vLLM's sleep at level %d: %s", level, problem)
            freed = problem is None
        else:
            logger.warning("vLLM frees no memory on this platform: sleep at level %d only stops admission", level)
        if level == 2:
            self._receiver.weights_given_up()
            self._unfit = "woken from sleep at level 2, which gives the weights up"
        return freed

    def wake(self, tags: list[str] | None = None) -> None:
        """Take the memory again (``tags``: "weights" or "kv_cache" alone) and admit. After level 2 a refit must follow:
        until then the engine is unfit."""
        if not self._asleep:
            raise RuntimeError("the engine does not sleep")
        if self._can_sleep:
            self.llm.wake_up(tags=tags)
            self._weights_away &= tags is not None and "weights" not in tags
            if self.llm.llm_engine.is_sleeping():  # some of the tags are still to come
                return
        self._asleep = 0
        if self._unfit is None:
            self._receiver.refresh_after_wake()  # weights came back, what was derived from them may not have
        self.resume()

    @property
    def _can_sleep(self) -> bool:
        return bool(getattr(self.llm.llm_engine.model_config, "enable_sleep_mode", False))

    def close(self) -> None:
        """End the engine core and let go of its memory. The engine can't be used afterwards."""
        self._unfit = "closed"
        stop_llm(self.llm)
        del self._vllm, self._scheduler, self._scorer, self._receiver, self.llm
        gc.collect()

    def _problem(self, request: GenerateRequest) -> str | None:
        if request.want_routes and not self.settings.record_routes:
            return "expert ids need an engine started with record_routes"
        temperature = request.sampling.temperature
        if temperature > HOTTEST or 0 < temperature < COLDEST:
            return f"vLLM samples at temperatures from {COLDEST} to {HOTTEST}, or greedily; it is {temperature}"
        return super()._problem(request)


def pausable_bytes() -> int:
    """Bytes that vLLM's sleep gives back: what its allocator holds, weights and caches; 0 where it has none."""
    from vllm.device_allocator.cumem import CuMemAllocator  # pyright: ignore[reportMissingImports]

    return int(CuMemAllocator.get_instance().get_current_usage())


def _recorder(model: Any, runner: Any, llm: Any, settings: VllmSettings) -> RouteRecorder | None:
    """None where vLLM returns expert ids itself. Raises EngineUnavailable where nothing records them."""
    if getattr(_aux_config(llm), "enable_return_routed_experts", False):
        return None
    if not settings.enforce_eager or not has_batch(runner):
        raise EngineUnavailable(
            "rollout.record_routes: this vLLM does not return expert ids, and they can be taken from its routers only "
            "with rollout.vllm.enforce_eager = true on model runner V1"
        )
    try:
        return RouteRecorder(model, runner)
    except ValueError as error:
        raise EngineUnavailable(f"rollout.record_routes: {error}") from error


def _aux_config(llm: Any) -> Any:
    """Where releases keep the switch: on the model's configuration, or on one of auxiliary outputs."""
    config = llm.llm_engine.vllm_config
    return getattr(config, "aux_output_config", None) or config.model_config


def _replays_traces(llm: Any) -> bool:
    config = llm.llm_engine.vllm_config
    runs_v2 = bool(getattr(config, "use_v2_model_runner", False))
    return runs_v2 and bool(getattr(config.model_config, "enable_trace_replay", False))


def _forced(runner: Any) -> ForcedTokens:
    if not has_batch(runner) or not hasattr(getattr(runner, "sampler", None), "sample"):
        raise EngineUnavailable("this vLLM has neither trace replay nor a sampler that can be told its tokens")
    return ForcedTokens(runner)
