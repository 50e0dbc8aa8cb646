"""Continuous batching: which requests wait, which decode, and one step of the lot. Synchronous; no event loop here.

    submit ──► waiting ──admit: prefill each different prompt once, give every sample a slot──► running
                  ▲                                                                                │ decode one token
                  └──────── requeue (pause "keep"): tokens stay, cached keys and values don't ◄────┤ for all slots
                                                                                                   ▼
                                                                              finished (stop, length, aborted, failed)

A prefilled prompt is kept only while another waiting request needs it, and never beyond a change of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lockstep.records import Completion, FinishReason, GenerateRequest
from lockstep.rollout.decoding import Decoder, DecoderState, Prefilled
from lockstep.rollout.random_stream import uniforms
from lockstep.rollout.sampler import SamplingBatch, sample


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made. ``mean_slots_used`` is decode rows per decode step."""

    num_prefilled_tokens: int = 0
    num_prefilled_sequences: int = 0
    num_generated_tokens: int = 0
    num_decode_steps: int = 0
    num_decode_rows: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0

    @property
    def mean_slots_used(self) -> float | None:
        """Mean number of sequences in a decode step; None before the first."""
        return self.num_decode_rows / self.num_decode_steps if self.num_decode_steps else None


@dataclass(slots=True, eq=False)
class Running:
    """One request on its way: what it has sampled so far and where its cache is. Private to the scheduler."""

    request: GenerateRequest
    max_new_tokens: int
    deliver: Callable[[Completion], None]
    fail: Callable[[BaseException], None]
    stop_ids: frozenset[int]
    seed: np.uint64
    key: tuple[int, ...] = ()  # what must be in the cache before it runs; see Scheduler.submit
    slot: int = -1
    kv_version: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # pieces [t, L, K]

    def completion(self, reason: FinishReason, error: str | None = None) -> Completion:
        """What was sampled so far, as the record that the caller gets."""
        routes = None
        if self.request.want_routes and self.routes:
            length = len(self.request.prompt_tokens) + len(self.tokens) - 1
            routes = np.concatenate(self.routes)[:length]
        return Completion(
            request_id=self.request.request_id,
            tokens=np.asarray(self.tokens, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            versions=np.asarray(self.versions, dtype=np.int32),
            kv_versions=np.asarray(self.kv_versions, dtype=np.int32),
            finish_reason=reason,
            routes=routes,
            error=error,
        )


class Scheduler:
    """Runs requests over ``num_slots`` slots of a decoder. ``decode_text`` turns token ids into text for stop strings.

    ``version`` is the policy version that tokens and caches are stamped with; the engine sets it.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_slots: int,
        prefill_tokens: int,
        decode_text: Callable[[list[int]], str] | None,
        version: int,
    ) -> None:
        self.decoder = decoder
        self.num_slots = num_slots
        self.prefill_tokens = prefill_tokens
        self.decode_text = decode_text
        self.version = version
        self.stats = EngineStats()
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self._free = list(range(num_slots))
        self._state: DecoderState = decoder.new_state(num_slots)
        self._prefilled: dict[tuple[int, ...], Prefilled] = {}
        self._columns: SamplingBatch | None = None  # of self.running, rebuilt when it changes
        self._seeds = np.empty(0, dtype=np.uint64)

    # --- what the engine calls --------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def submit(self, entry: Running) -> None:
        """Queue a request."""
        entry.key = _prefix_key(entry)
        self.waiting.append(entry)

    def step(self, admit: bool = True) -> None:
        """Admit what fits, then sample one token for everything that runs."""
        with torch.inference_mode():
            if admit:
                self._admit()
            if self.running:
                self._decode()

    def take(self, entries: Iterable[Running]) -> None:
        """Remove requests, waiting or running, without completing them."""
        gone = set(map(id, entries))
        self.waiting = [entry for entry in self.waiting if id(entry) not in gone]
        self._release([entry for entry in self.running if id(entry) in gone])
        self._drop_unneeded_prompts()

    def abort(self, entries: Iterable[Running]) -> None:
        """Complete requests with what they have sampled so far. Ones that are done already are left alone."""
        pending = set(map(id, [*self.waiting, *self.running]))
        entries = [entry for entry in entries if id(entry) in pending]
        self.take(entries)
        for entry in entries:
            self.stats.num_aborted += 1
            entry.deliver(entry.completion("aborted"))

    def requeue_running(self) -> None:
        """Send everything that runs back to the head of the queue, to be prefilled again with what it sampled."""
        entries = list(self.running)
        self._release(entries)
        for entry in entries:
            entry.key = _prefix_key(entry)
        self.waiting[:0] = entries
        self.drop_caches()

    def drop_caches(self) -> None:
        """Forget all cached keys and values (the weights changed). Nothing may be running."""
        if self.running:
            raise RuntimeError(f"{len(self.running)} sequences still decode from the caches that are to be dropped")
        self._prefilled.clear()
        self._state = self.decoder.new_state(self.num_slots)

    def fail_all(self, error: BaseException) -> None:
        """A step raised: nothing in flight can be trusted. Every request gets the error."""
        entries = [*self.running, *self.waiting]
        self.waiting, self.running, self._columns = [], [], None
        self._free = list(range(self.num_slots))
        self.drop_caches()
        for entry in entries:
            self.stats.num_failed += 1
            entry.fail(error)

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        chosen = self._choose()
        if not chosen:
            return
        self._prefill_new(chosen)
        self.waiting = self.waiting[len(chosen) :]
        by_prefix: dict[tuple[int, ...], list[Running]] = {}
        for entry in chosen:
            by_prefix.setdefault(entry.key, []).append(entry)
        started: list[Running] = []
        logits: list[torch.Tensor] = []
        for key, entries in by_prefix.items():
            prefilled = self._prefilled[key]
            slots = [self._free.pop() for _ in entries]
            self._state.place(prefilled, slots)
            logits.append(self.decoder.logits(prefilled.hidden[-1:]).expand(len(entries), -1))
            for entry, slot in zip(entries, slots, strict=True):
                entry.slot, entry.kv_version = slot, self.version
                if prefilled.routes is not None:
                    # After a requeue, earlier positions keep the ids that their sampled tokens came from.
                    entry.routes.append(prefilled.routes[sum(map(len, entry.routes)) :])
            started.extend(entries)
        self.running.extend(started)
        self._columns = None
        self._drop_unneeded_prompts()
        columns = SamplingBatch.of([entry.request.sampling for entry in started])
        self._accept(started, torch.cat(logits), columns, _seeds(started))

    def _choose(self) -> list[Running]:
        """The head of the queue: as many as there are free slots, new prompt tokens within the prefill budget."""
        chosen: list[Running] = []
        new: set[tuple[int, ...]] = set()
        budget = self.prefill_tokens
        for entry in self.waiting[: len(self._free)]:
            if entry.key not in self._prefilled and entry.key not in new:
                num_tokens = len(entry.key) - 1
                if new and num_tokens > budget:
                    break
                budget -= num_tokens
                new.add(entry.key)
            chosen.append(entry)
        return chosen

    def _prefill_new(self, chosen: Sequence[Running]) -> None:
        for want_routes in (False, True):
            keys = dict.fromkeys(entry.key for entry in chosen if entry.request.want_routes is want_routes)
            new = [key for key in keys if key not in self._prefilled]
            if not new:
                continue
            sequences = [torch.tensor(key[1:]) for key in new]
            results = self.decoder.prefill(
                sequences, keep_cache=True, want_routes=want_routes, max_tokens=self.prefill_tokens
            )
            self._prefilled.update(zip(new, results, strict=True))
            self.stats.num_prefilled_sequences += len(new)
            self.stats.num_prefilled_tokens += sum(map(len, sequences))

    def _drop_unneeded_prompts(self) -> None:
        if self._prefilled:
            needed = {entry.key for entry in self.waiting}
            self._prefilled = {key: value for key, value in self._prefilled.items() if key in needed}

    # --- decoding -----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        entries = self.running
        if self._columns is None:
            self._columns = SamplingBatch.of([entry.request.sampling for entry in entries])
            self._seeds = _seeds(entries)
        want_routes = any(entry.request.want_routes for entry in entries)
        tokens = torch.tensor([entry.tokens[-1] for entry in entries])
        logits, routes = self._state.decode([entry.slot for entry in entries], tokens, want_routes)
        self.stats.num_decode_steps += 1
        self.stats.num_decode_rows += len(entries)
        if routes is not None:
            for row, entry in enumerate(entries):
                if entry.request.want_routes:
                    entry.routes.append(routes[row : row + 1])
        self._accept(entries, logits, self._columns, self._seeds)

    def _accept(
        self, entries: Sequence[Running], logits: torch.Tensor, columns: SamplingBatch, seeds: np.ndarray
    ) -> None:
        """Sample one token for each entry and complete those that are done."""
        counters = np.array([len(entry.tokens) for entry in entries], dtype=np.uint64)
        drawn = sample(logits, columns, uniforms(seeds, counters))
        done: list[tuple[Running, Completion]] = []
        rows = zip(entries, drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.valid.tolist(), strict=True)
        for entry, token, logprob, valid in rows:
            if not valid:
                error = f"logits of sampled token {len(entry.tokens)} hold NaN or +Inf, or exclude every token"
                done.append((entry, entry.completion("failed", error)))
                continue
            entry.tokens.append(token)
            entry.logprobs.append(logprob)
            entry.versions.append(self.version)
            entry.kv_versions.append(entry.kv_version)
            self.stats.num_generated_tokens += 1
            reason = self._finish_reason(entry)
            if reason is not None:
                done.append((entry, entry.completion(reason)))
        if not done:
            return
        self._release([entry for entry, _ in done])
        for entry, completion in done:
            self.stats.num_failed += completion.finish_reason == "failed"
            self.stats.num_finished += completion.finish_reason != "failed"
            entry.deliver(completion)

    def _finish_reason(self, entry: Running) -> FinishReason | None:
        if entry.tokens[-1] in entry.stop_ids:
            return "stop"
        strings = entry.request.sampling.stop_strings
        if strings and self.decode_text is not None:
            # The whole text, because a token's text may depend on the tokens before it.
            text = self.decode_text(entry.tokens)
            if any(string in text for string in strings):
                return "stop"
        return "length" if len(entry.tokens) >= entry.max_new_tokens else None

    def _release(self, entries: Sequence[Running]) -> None:
        """Free the slots of running entries."""
        if not entries:
            return
        gone = set(map(id, entries))
        self.running = [entry for entry in self.running if id(entry) not in gone]
        with torch.inference_mode():  # the caches were made in it, and this may be called from outside a step
            self._state.release([entry.slot for entry in entries])
        for entry in entries:
            self._free.append(entry.slot)
            entry.slot = -1
        self._columns = None


def _prefix_key(entry: Running) -> tuple[int, ...]:
    """Tokens that must be in the cache before the next one is sampled, after a mark for wanting routes."""
    return (int(entry.request.want_routes), *entry.request.prompt_tokens.tolist(), *entry.tokens)


def _seeds(entries: Sequence[Running]) -> np.ndarray:
    return np.array([entry.seed for entry in entries], dtype=np.uint64)
