"""The decoder for every causal model of transformers: the model's own forward over its own cache. Right, not fast.

Nothing is padded, on either side, because not every architecture is exact under padding (DeepSeek-V4's logits are off
by 0.48 with left padding). Only sequences of equal length share a forward: prompts of equal length are prefilled
together, and sequences whose caches have equal length form a *cohort* that decodes as one batch. The samples of a
group start together, so a group is a cohort by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.model.adapter import SplitModel, num_experts, recorded_routes, stacked_routes
from lockstep.rollout import cache_rows
from lockstep.rollout.decoding import DecoderState, Prefilled


def run_body(
    split: SplitModel, input_ids: torch.Tensor, cache: Any, want_routes: bool
) -> tuple[torch.Tensor, np.ndarray | None]:
    """Hidden states [B, T, H] and, if asked for, expert ids [B, T, L, K] of one forward of the body."""
    if not want_routes:
        return split.hidden(input_ids, cache=cache), None
    with recorded_routes(split.model) as records:
        hidden = split.hidden(input_ids, cache=cache)
    if not records:
        return hidden, None
    layers = [record[-1].reshape(*input_ids.shape, -1) for record in records]
    return hidden, stacked_routes(layers, num_experts(split.model))


class ModuleDecoder:
    """Decodes through the modules of ``model``. ``vocab_limit``: logits beyond the tokenizer are cut off."""

    def __init__(self, model: Any, vocab_limit: int | None = None) -> None:
        self.split = SplitModel(model)
        self.vocab_limit = vocab_limit

    def prefill(
        self, sequences: Sequence[torch.Tensor], *, keep_cache: bool, want_routes: bool, max_tokens: int
    ) -> list[Prefilled]:
        """See ``Decoder``. Sequences of equal length share a forward; nothing is padded."""
        results: list[Prefilled | None] = [None] * len(sequences)
        by_length: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            by_length.setdefault(len(sequence), []).append(index)
        for length, indices in by_length.items():
            per_forward = max(1, max_tokens // length)
            if keep_cache and not cache_rows.is_batchable(self.split.new_cache()):
                per_forward = 1
            for start in range(0, len(indices), per_forward):
                chunk = indices[start : start + per_forward]
                cache = self.split.new_cache() if keep_cache else None
                batch = torch.stack([sequences[i] for i in chunk])
                hidden, routes = run_body(self.split, batch, cache, want_routes)
                for row, index in enumerate(chunk):
                    own = None if cache is None else (cache if len(chunk) == 1 else cache_rows.rows_of(cache, [row]))
                    results[index] = Prefilled(hidden[row], None if routes is None else routes[row], own)
        return [result for result in results if result is not None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Decoder``. They come to the host, where sampling is done."""
        return self.split.logits(hidden)[:, : self.vocab_limit].cpu()

    def new_state(self, num_slots: int) -> DecoderState:
        """See ``Decoder``. Cohorts grow as they come; the number of slots is the scheduler's business."""
        del num_slots
        return CohortState(self)

    def refresh(self) -> None:
        """Nothing is derived: the modules' own parameters are what is computed with."""

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """No weight has a layout of its own."""
        return iter(())


@dataclass(slots=True)
class _Cohort:
    """Sequences of equal cached length: row i of ``cache`` belongs to ``slots[i]``."""

    cache: Any
    slots: list[int]
    length: int


class CohortState:
    """Slots of a ``ModuleDecoder``, grouped into cohorts of equal length."""

    def __init__(self, decoder: ModuleDecoder) -> None:
        self._decoder = decoder
        self._cohorts: list[_Cohort] = []

    def place(self, prefilled: Prefilled, slots: Sequence[int]) -> None:
        """See ``DecoderState``. Joins the cohort of the same length if there is one and the cache allows it."""
        length = len(prefilled.hidden)
        if not cache_rows.is_batchable(prefilled.cache):
            for slot in slots:
                self._cohorts.append(_Cohort(cache_rows.rows_of(prefilled.cache, [0]), [slot], length))
            return
        rows = cache_rows.rows_of(prefilled.cache, [0] * len(slots))
        for cohort in self._cohorts:
            if cohort.length == length:
                cohort.cache = cache_rows.joined([cohort.cache, rows])
                cohort.slots.extend(slots)
                return
        self._cohorts.append(_Cohort(rows, list(slots), length))

    def decode(
        self, slots: Sequence[int], tokens: torch.Tensor, want_routes: bool
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """See ``DecoderState``: one forward per cohort."""
        position = {slot: index for index, slot in enumerate(slots)}
        hidden_rows: list[torch.Tensor | None] = [None] * len(slots)
        route_rows: list[np.ndarray | None] = [None] * len(slots)
        for cohort in self._cohorts:
            order = [position[slot] for slot in cohort.slots]
            hidden, routes = run_body(self._decoder.split, tokens[order][:, None], cohort.cache, want_routes)
            cohort.length += 1
            for row, index in enumerate(order):
                hidden_rows[index] = hidden[row, 0]
                route_rows[index] = None if routes is None else routes[row, 0]
        logits = self._decoder.logits(torch.stack([row for row in hidden_rows if row is not None]))
        if route_rows[0] is None:
            return logits, None
        return logits, np.stack([row for row in route_rows if row is not None])

    def release(self, slots: Sequence[int]) -> None:
        """See ``DecoderState``."""
        gone = set(slots)
        for cohort in self._cohorts:
            kept = [row for row, slot in enumerate(cohort.slots) if slot not in gone]
            if kept and len(kept) < len(cohort.slots):
                cohort.cache = cache_rows.rows_of(cohort.cache, kept)
            cohort.slots = [cohort.slots[row] for row in kept]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.slots]
