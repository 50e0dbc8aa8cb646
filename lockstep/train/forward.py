"""The one forward that training, old log-probs, references and teachers share: micro-batch in, log-probs out."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from lockstep.interfaces import LogProbs
from lockstep.model.adapter import SplitModel, recorded_routes, routers
from lockstep.model.architectures import architecture_of, choose_packing
from lockstep.records import Sequence
from lockstep.train.packing import Layout, MicroBatch, WantedTokens, plan
from lockstep.train.row_attention import RowLayout, row_attention
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
        config = model.config
        # On a CPU, packed sequences lie one after another and attention is done in rows; elsewhere rows are padded.
        self.flat = (
            self.layout in ("packed", "shared_prompt")
            and next(model.parameters()).device.type == "cpu"
            and architecture_of(config).plain_attention
            and config._attn_implementation == "sdpa"
        )
        self.max_tokens = micro_batch_tokens
        self.device = next(model.parameters()).device

    def plan(self, sequences: Seq[WantedTokens]) -> list[MicroBatch]:
        """Micro-batches of these sequences in the layout and budget of this forward."""
        return plan(sequences, self.layout, self.max_tokens)

    def attention(self) -> AbstractContextManager[None]:
        """To be held over a forward *and* its backward, which may run layers again (gradient checkpointing)."""
        return row_attention(self.split.model.config) if self.flat else nullcontext()

    def __call__(self, batch: MicroBatch, *, top1: bool = False) -> ForwardOutput:
        """Run one micro-batch inside ``attention()``, with a gradient if autograd is on."""
        used, rows = np.unique(batch.predictors, return_inverse=True)
        states = self._hidden(batch)[self._tensor(self._model_positions(batch, used))]
        row_index = self._tensor(rows.astype(np.int64))
        logprobs = self.head(states, row_index, self._tensor(batch.tokens))
        return ForwardOutput(logprobs, self.head.argmax(states, row_index) if top1 else None)

    def num_tokens(self, batch: MicroBatch) -> int:
        """Positions that the model's linears see: without padding where sequences lie one after another."""
        return int((batch.segments >= 0).sum()) if self.flat and batch.segments is not None else batch.input_ids.size

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _model_positions(self, batch: MicroBatch, positions: np.ndarray) -> np.ndarray:
        """Positions in the rows of ``batch`` as positions in the hidden states that the model returns."""
        if not self.flat or batch.segments is None:
            return positions
        return (np.cumsum(batch.segments.ravel() >= 0) - 1)[positions]

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Hidden states [positions, H]."""
        if batch.segments is None:
            return self.split.hidden(self._tensor(batch.input_ids)).flatten(0, 1)
        if not self.flat:
            ids, positions = self._tensor(batch.input_ids), self._tensor(batch.position_ids)
            mask = self._allowed(batch)
            if self.split.model.config._attn_implementation != "sdpa":
                dtype = self.split.model.dtype
                mask = torch.zeros(mask.shape, dtype=dtype, device=self.device).masked_fill_(
                    ~mask, torch.finfo(dtype).min
                )
            return self.split.hidden(ids, position_ids=positions, attention_mask=mask).flatten(0, 1)
        places = np.flatnonzero(batch.segments.ravel() >= 0)
        return self.split.hidden(
            self._tensor(batch.input_ids.ravel()[places])[None],
            position_ids=self._tensor(batch.position_ids.ravel()[places])[None],
            row_layout=RowLayout.of(self._tensor(places), self._allowed(batch)),
        )[0]

    def _allowed(self, batch: MicroBatch) -> torch.Tensor:
        """Who may see whom, bool [R, 1, n, n]."""
        assert batch.segments is not None
        assert batch.prefixes is not None
        segments, prefixes = self._tensor(batch.segments), self._tensor(batch.prefixes)
        same = segments[:, :, None] == segments[:, None, :]
        return (same | (prefixes[:, :, None] == segments[:, None, :])).tril()[:, None]

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
            with recorder as records, self.attention():
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
                    found[: len(inputs)] = chosen[self._model_positions(batch, inputs)]
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
