"""Requests over an in-process ``vllm.LLM``: the counterpart of ``scheduler.py``, one engine step at a time.

    submit ──► waiting ──admit: handed to vLLM, at most num_slots at once──► started ──step──► finished
                                                      ▲                         │
                                                      └──── requeue: preempted, cached keys and values freed

vLLM batches, prefills and decodes; prompts that requests share are its prefix cache's business. A requeued request
stays with vLLM, so that its random stream goes on where it was, and is prefilled again at the next step with what it
has sampled. What scores tokens runs through the same steps (``run``), since there is one engine core.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from lockstep.records import FinishReason, RouteArray
from lockstep.rollout.scheduler import EngineStats, Running
from lockstep.rollout.vllm_hooks import RouteRecorder, model_runner

_LARGEST_SEED = 2**63 - 1


class VllmScheduler:
    """See ``queued_engine.RequestScheduler``. ``recorder`` None: expert ids come with vLLM's own outputs, or not."""

    def __init__(
        self,
        llm: Any,
        *,
        num_slots: int,
        decode_text: Callable[[list[int]], str] | None,
        recorder: RouteRecorder | None,
        version: int,
    ) -> None:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        self.version = version
        self.stats = EngineStats()
        self.decode_text = decode_text
        self.waiting: list[Running] = []
        self._engine: Any = llm.llm_engine
        self._runner: Any = model_runner(llm)
        self._not_finite = False  # what was computed since the cache was last clean held NaN
        self._params: Any = SamplingParams
        self._kinds: Any = RequestOutputKind
        self._num_slots = num_slots
        self._recorder = recorder
        self._started: dict[str, Running] = {}
        self._internal: dict[str, str] = {}
        self._results: dict[str, Any] = {}  # outputs of ``run`` by external id, None until finished
        self._numbers = itertools.count()
        if "reset_running_requests" not in inspect.signature(self._engine.reset_prefix_cache).parameters:
            raise RuntimeError("the installed vLLM can't preempt running requests: a refit could not keep them")

    # --- RequestScheduler ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Running]:
        """Requests whose keys and values vLLM holds, or will at the next step."""
        return [entry for entry in self._started.values() if entry.slot >= 0]

    @property
    def has_work(self) -> bool:
        """Whether anything waits or has been started."""
        return bool(self.waiting or self._started)

    def submit(self, entry: Running) -> None:
        """Queue a request."""
        self.waiting.append(entry)

    def step(self, admit: bool = True) -> None:
        """Hand over what fits, then one step of vLLM: at most one token for each request."""
        self._clean_if_idle()
        if admit:
            room = self._num_slots - len(self._started)
            admitted, self.waiting = self.waiting[:room], self.waiting[room:]
            for entry in admitted:
                self._start(entry)
        if self._started:
            self._step()

    def take(self, entries: Iterable[Running]) -> None:
        """Remove requests, waiting or started, without completing them."""
        gone = set(map(id, entries))
        self.waiting = [entry for entry in self.waiting if id(entry) not in gone]
        self._forget([name for name, entry in self._started.items() if id(entry) in gone], abort=True)

    def abort(self, entries: Iterable[Running]) -> None:
        """Complete requests with what they have sampled so far. Ones that are done already are left alone."""
        pending = set(map(id, [*self.waiting, *self._started.values()]))
        entries = [entry for entry in entries if id(entry) in pending]
        for entry in entries:
            self._collect_routes(entry)
        self.take(entries)
        for entry in entries:
            self.stats.num_aborted += 1
            entry.deliver(entry.completion("aborted"))

    def requeue_running(self) -> None:
        """Preempt everything that runs: its keys and values are freed, tokens and random streams stay."""
        self._engine.reset_prefix_cache(reset_running_requests=True)
        for entry in self._started.values():
            entry.slot = entry.kv_version = -1

    def drop_caches(self) -> None:
        """Forget every cached key, value and encoder output (the weights changed). Nothing may be running."""
        if self.running:
            raise RuntimeError(f"{len(self.running)} sequences still decode from the caches that are to be dropped")
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache: keys of the old weights would be served")
        self._engine.reset_mm_cache()
        if hasattr(self._engine, "reset_encoder_cache"):
            self._engine.reset_encoder_cache()
        self._clean()

    def note_not_finite(self) -> None:
        """Something that was computed is NaN, and so may be what it left in the cache: kernels that multiply the part
        of a block that nobody has written by 0 would spread it to whoever gets the block, whatever the weights are."""
        self._not_finite = True

    def _clean_if_idle(self) -> None:
        """Not beside other requests: they may read the very blocks."""
        if self._not_finite and not self._started and self._engine.reset_prefix_cache():
            self._clean()

    def _clean(self) -> None:
        """Zeros in a cache that nobody reads: all of it, since some are bytes to vLLM (fp8 beside its scales), in which
        NaN can't be told from a number."""
        if not self._not_finite:
            return
        for cache in tree_leaves(self._runner.kv_caches):
            cache.zero_()
        self._not_finite = False

    def fail_all(self, error: BaseException) -> None:
        """A step raised, or the weights are a mixture: every request gets the error."""
        entries = [*self._started.values(), *self.waiting]
        self.waiting = []
        self._forget(list(self._started), abort=True)
        for entry in entries:
            self.stats.num_failed += 1
            entry.fail(error)

    # --- scoring ------------------------------------------------------------------------------------------------------

    @property
    def started(self) -> int:
        """Requests that vLLM holds, preempted ones included."""
        return len(self._started)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Any],
        *,
        want_routes: bool = False,
        on_start: Callable[[int, str], None] | None = None,
    ) -> list[tuple[Any, RouteArray | None]]:
        """Run requests to their end, beside whatever else has been started: vLLM's final output and expert ids
        [prompt + sampled − 1, L, K] of each. ``on_start(index, internal id)`` is called before the first step."""
        self._clean_if_idle()
        names: list[str] = []
        try:
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                name = f"score-{next(self._numbers)}"
                self._results[name] = None
                names.append(name)
                self._add(name, prompt, one, want_routes=want_routes)
                if on_start is not None:
                    on_start(index, self._internal[name])
            while any(self._results[name] is None for name in names):
                self._step()
            return [(self._results[name], self._scored_routes(name, want_routes)) for name in names]
        finally:
            unfinished = [name for name in names if self._results.pop(name) is None]
            if unfinished:
                self._engine.abort_request(unfinished)
            for name in names:
                internal = self._internal.pop(name, None)
                if internal is not None and self._recorder is not None:
                    self._recorder.drop(internal)

    def scoring_params(self, **options: Any) -> Any:
        """vLLM's ``SamplingParams`` for ``run``: no stop, no text, one final output."""
        return self._params(ignore_eos=True, detokenize=False, output_kind=self._kinds.FINAL_ONLY, **options)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self, entry: Running) -> None:
        sampling = entry.request.sampling
        params = self._params(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=int(entry.seed) & _LARGEST_SEED,
            stop_token_ids=sorted(entry.stop_ids),
            ignore_eos=True,  # only what the request names stops it
            max_tokens=entry.max_new_tokens,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=self._kinds.DELTA,
        )
        name = f"generate-{next(self._numbers)}"
        entry.slot = 0
        self._add(name, entry.request.prompt_tokens.tolist(), params, want_routes=entry.request.want_routes)
        self._started[name] = entry

    def _add(self, name: str, prompt: Sequence[int], params: Any, *, want_routes: bool) -> None:
        given = self._engine.add_request(name, {"prompt_token_ids": [int(one) for one in prompt]}, params)
        # vLLM adds a random suffix to names, which its runner goes by, and returns the result (older ones: nothing).
        self._internal[name] = given if isinstance(given, str) else name
        if want_routes and self._recorder is not None:
            self._recorder.want(self._internal[name])

    def _step(self) -> None:
        before = self.stats.num_generated_tokens
        for output in self._engine.step():
            entry = self._started.get(output.request_id)
            if entry is not None:
                self._accept(output.request_id, entry, output)
            elif output.request_id in self._results and output.finished:
                self._results[output.request_id] = output
        for entry in self._started.values():
            entry.slot = 0
        self.stats.num_decode_steps += 1
        self.stats.num_decode_rows += self.stats.num_generated_tokens - before

    def _accept(self, name: str, entry: Running, output: Any) -> None:
        if not entry.tokens:
            self.stats.num_prefilled_sequences += 1
            self.stats.num_prefilled_tokens += len(entry.request.prompt_tokens) - int(output.num_cached_tokens or 0)
        piece = output.outputs[0]
        if entry.kv_version < 0:
            entry.kv_version = self.version
        for token, table in zip(piece.token_ids, piece.logprobs or (), strict=True):
            logprob = float(table[token].logprob)
            if not math.isfinite(logprob):
                self.note_not_finite()
                error = f"logits of sampled token {len(entry.tokens)} hold NaN or +Inf, or exclude every token"
                self._finish(name, entry, "failed", error, abort=not output.finished)
                return
            entry.tokens.append(int(token))
            entry.logprobs.append(logprob)
            entry.versions.append(self.version)
            entry.kv_versions.append(entry.kv_version)
            self.stats.num_generated_tokens += 1
            if self._stops_by_text(entry):
                self._finish(name, entry, "stop", abort=not output.finished)
                return
        if output.finished:
            stopped = bool(entry.tokens) and entry.tokens[-1] in entry.stop_ids
            if getattr(piece, "routed_experts", None) is not None:
                entry.routes = [piece.routed_experts]
            self._finish(name, entry, "stop" if stopped else "length")

    def _stops_by_text(self, entry: Running) -> bool:
        strings = entry.request.sampling.stop_strings
        if not strings or self.decode_text is None:
            return False
        # The whole text, because a token's text may depend on the tokens before it.
        text = self.decode_text(entry.tokens)
        return any(string in text for string in strings)

    def _finish(
        self, name: str, entry: Running, reason: FinishReason, error: str | None = None, *, abort: bool = False
    ) -> None:
        self._collect_routes(entry)
        self._forget([name], abort=abort)
        self.stats.num_failed += reason == "failed"
        self.stats.num_finished += reason != "failed"
        entry.deliver(entry.completion(reason, error))

    def _collect_routes(self, entry: Running) -> None:
        """The recorder's ids of a started request, as one piece."""
        if self._recorder is None or not entry.request.want_routes or not entry.tokens:
            return
        name = next(name for name, one in self._started.items() if one is entry)
        length = len(entry.request.prompt_tokens) + len(entry.tokens) - 1
        entry.routes = [self._recorder.take(self._internal[name], length)]

    def _scored_routes(self, name: str, want_routes: bool) -> RouteArray | None:
        output = self._results[name]
        if not want_routes:
            return None
        if self._recorder is None:
            return getattr(output.outputs[0], "routed_experts", None)
        length = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        return self._recorder.take(self._internal[name], length)

    def _forget(self, names: Sequence[str], *, abort: bool) -> None:
        if abort and names:
            self._engine.abort_request(list(names))
        for name in names:
            entry = self._started.pop(name)
            entry.slot = -1
            internal = self._internal.pop(name)
            if self._recorder is not None:
                self._recorder.drop(internal)
