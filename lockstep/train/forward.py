"""The one forward that training, old log-probs, references and teachers share: micro-batch in, log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from lockstep.interfaces import LogProbs
from lockstep.model.adapter import SplitModel, recorded_routes, routers
from lockstep.model.architectures import choose_packing
from lockstep.records import Sequence
from lockstep.train.packing import Layout, MicroBatch, WantedTokens, plan
from lockstep.train.token_logprobs import TokenLogProbs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Packing = Literal["auto", "single", "padded", "packed", "shared_prompt"]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Log-probs [M] float32 in the micro-batch's order; argmax tokens [M] if they were asked for."""

    logprobs: torch.Tensor
    top1: torch.Tensor | None


class PolicyForward:
    """Log-probs of the sampling distribution under ``model``, by micro-batches of a token budget.

    ``packing`` "auto" takes the densest layout that is exact for the architecture. The model isn't changed.
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
    ) -> None:
        self.split = SplitModel(model)
        self.head = TokenLogProbs(
            self.split, temperature=temperature, vocab_limit=vocab_limit, chunk_tokens=chunk_tokens
        )
        self.layout: Layout = choose_packing(packing, model.config)
        self.max_tokens = micro_batch_tokens
        self.device = next(model.parameters()).device

    def plan(self, sequences: Seq[WantedTokens]) -> list[MicroBatch]:
        """Micro-batches of these sequences in the layout and budget of this forward."""
        return plan(sequences, self.layout, self.max_tokens)

    def __call__(self, batch: MicroBatch, *, top1: bool = False) -> ForwardOutput:
        """Run one micro-batch, with a gradient if autograd is on."""
        to_device: Callable[[np.ndarray], torch.Tensor] = lambda array: torch.from_numpy(array).to(self.device)  # noqa: E731
        masked = batch.segments is not None
        hidden = self.split.hidden(
            to_device(batch.input_ids),
            position_ids=to_device(batch.position_ids) if masked else None,
            attention_mask=self._mask(batch) if masked else None,
        )
        used, rows = np.unique(batch.predictors, return_inverse=True)
        states = hidden.flatten(0, 1)[to_device(used)]
        row_index = to_device(rows.astype(np.int64))
        logprobs = self.head(states, row_index, to_device(batch.tokens))
        return ForwardOutput(logprobs, self.head.argmax(states, row_index) if top1 else None)

    def _mask(self, batch: MicroBatch) -> torch.Tensor:
        """[R, 1, n, n]: boolean for SDPA, added to the scores for eager attention."""
        assert batch.segments is not None
        assert batch.prefixes is not None
        segments = torch.from_numpy(batch.segments).to(self.device)
        prefixes = torch.from_numpy(batch.prefixes).to(self.device)
        same = segments[:, :, None] == segments[:, None, :]
        allowed = (same | (prefixes[:, :, None] == segments[:, None, :])).tril()[:, None]
        if self.split.model.config._attn_implementation == "sdpa":
            return allowed
        dtype = self.split.model.dtype
        lowest = torch.finfo(dtype).min
        return torch.zeros(allowed.shape, dtype=dtype, device=self.device).masked_fill_(~allowed, lowest)

    @torch.no_grad()
    def score(
        self,
        sequences: Seq[Sequence],
        version: int,
        *,
        positions: Literal["sampled", "all"] = "sampled",
        top1: bool = False,
        routes: bool = False,
    ) -> dict[str, LogProbs]:
        """Log-probs without a gradient, NaN (top-1: -1) where none was asked for.

        ``positions`` "all" scores the prompt too, except token 0. ``routes`` adds expert ids [T-1, L, K], -1 at
        positions that this forward did not run (after the last position asked for).
        """
        wanted = [WantedTokens(sequence.tokens, _wanted(sequence, positions)) for sequence in sequences]
        scores = [np.full(len(sequence.tokens), np.nan, dtype=np.float32) for sequence in sequences]
        best = [np.full(len(sequence.tokens), -1, dtype=np.int32) for sequence in sequences]
        experts: list[np.ndarray | None] = [None] * len(sequences)
        for batch in self.plan(wanted):
            recorder: AbstractContextManager[list[list[torch.Tensor]]] = nullcontext([])
            if routes and routers(self.split.model):
                recorder = recorded_routes(self.split.model)
            with recorder as records:
                output = self(batch, top1=top1)
            for index, places, where in by_sequence(batch):
                scores[index][places] = output.logprobs[where].cpu().numpy()
                if output.top1 is not None:
                    best[index][places] = output.top1[where].cpu().numpy()
            if records:
                # [flat positions, L, K]
                chosen = torch.stack([torch.cat(record) for record in records], dim=1).to(torch.int16).cpu().numpy()
                for index, inputs in batch.inputs.items():
                    found = np.full((len(sequences[index].tokens) - 1, *chosen.shape[1:]), -1, dtype=np.int16)
                    found[: len(inputs)] = chosen[inputs]
                    experts[index] = found
        return {
            sequence.sequence_id: LogProbs(scores[i], version, experts[i], best[i] if top1 else None)
            for i, sequence in enumerate(sequences)
        }


def by_sequence(batch: MicroBatch) -> Iterator[tuple[int, np.ndarray, torch.Tensor]]:
    """(sequence, positions [k], indices [k] into the micro-batch's log-probs) for each member, in position order."""
    order = np.lexsort((batch.positions, batch.sequences))
    owners = batch.sequences[order]
    edges = [*np.searchsorted(owners, batch.members, side="left").tolist(), len(owners)]
    for i, index in enumerate(batch.members):
        where = order[edges[i] : edges[i + 1]]
        yield index, batch.positions[where], torch.from_numpy(where)


def _wanted(sequence: Sequence, positions: Literal["sampled", "all"]) -> np.ndarray:
    if positions == "sampled":
        return sequence.loss_mask
    wanted = np.ones(len(sequence.tokens), dtype=np.bool_)
    wanted[:1] = False
    return wanted
