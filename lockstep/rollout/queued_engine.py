"""What every in-process rollout engine shares: requests in flight, the driver task, pauses, and unfitness.

    generate(request) ─► scheduler.submit ─► driver task: scheduler.step() while there is work ─► Completion
    receiver().begin … commit ─► running requests go back to the queue, weights change, caches dropped, resume

A scheduler is synchronous and knows nothing of event loops; this is the only place that does. One request that can't
be run (an empty prompt, an id outside the vocabulary, no room in the context) comes back alone as a completion with
``finish_reason="failed"``. An exception inside a step is a fault of the engine: it is raised to every caller whose
request was in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import numpy as np

from lockstep.records import Completion, GenerateRequest, SamplingParams
from lockstep.rollout.random_stream import as_seed
from lockstep.rollout.scheduler import EngineStats, Running


class EngineError(RuntimeError):
    """A step of the engine raised; the cause is chained."""


class EngineUnfit(RuntimeError):
    """The engine's weights may be a mixture, or are being replaced: it serves nothing until a refit commits."""


class RequestScheduler(Protocol):
    """What runs the requests. ``version`` stamps tokens and caches; the engine sets it."""

    version: int
    stats: EngineStats
    decode_text: Callable[[list[int]], str] | None

    @property
    def running(self) -> Sequence[Running]:
        """Requests that hold cached keys and values, or will at the next step without being admitted again."""
        ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, entry: Running) -> None: ...

    def step(self, admit: bool = True) -> None: ...

    def take(self, entries: Iterable[Running]) -> None: ...

    def abort(self, entries: Iterable[Running]) -> None: ...

    def requeue_running(self) -> None: ...

    def drop_caches(self) -> None: ...

    def fail_all(self, error: BaseException) -> None: ...


class QueuedEngine:
    """The asynchronous half of ``interfaces.Engine`` over a ``RequestScheduler``; ``score`` and ``receiver`` are the
    subclass's. It is its own ``RefitHost``.

    ``vocabulary`` bounds token ids, ``context`` (None: unbounded) prompt and answer together. ``stop_token_ids`` are
    added to every request's own.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        *,
        vocabulary: int,
        context: int | None,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._scheduler = scheduler
        self._vocabulary = vocabulary
        self._context = context
        self._stop_token_ids = stop_token_ids
        self._requests: dict[str, Running] = {}
        self._pauses: set[Literal["caller", "refit", "verify"]] = set()
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
            self._scheduler.abort(list(self._scheduler.running))
        else:
            self._scheduler.requeue_running()

    def resume(self) -> None:
        """Admit again."""
        self._pauses.discard("caller")
        self._wake()

    # --- RefitHost ----------------------------------------------------------------------------------------------------

    def refit_begun(self) -> None:
        """See ``RefitHost``."""
        self._pauses.add("refit")
        self._pauses.discard("verify")
        self._scheduler.requeue_running()

    def refit_committed(self, version: int) -> None:
        """See ``RefitHost``."""
        self._scheduler.drop_caches()
        self._scheduler.version = version
        self._unfit = None
        self._pauses.add("verify")
        self._pauses.discard("refit")

    def refit_over(self) -> None:
        """See ``RefitHost``. A pause that the caller asked for stays until ``resume``."""
        self._pauses.discard("verify")
        self._wake()

    def refit_aborted(self, reason: str) -> None:
        """See ``RefitHost``."""
        self._unfit = reason
        self._pauses -= {"refit", "verify"}
        self._scheduler.fail_all(EngineUnfit(f"the engine is unfit: {reason}"))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_fit(self) -> None:
        if self._unfit is not None:
            raise EngineUnfit(f"the engine is unfit until a refit commits: {self._unfit}")

    def _check_whole(self) -> None:
        """Raises EngineUnfit during or after a broken refit: nothing may be scored then."""
        self._check_fit()
        if "refit" in self._pauses:
            raise EngineUnfit("a refit is in progress: the weights are a mixture of two versions")

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
