"""The one forward that training, old log-probs, references and teachers share: micro-batch in, log-probs out."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from lockstep.interfaces import LogProbs
from lockstep.model.adapter import SplitModel, num_experts, recorded_routes, stacked_routes
from lockstep.model.architectures import architecture_of, choose_packing
from lockstep.records import RouteArray, Sequence
from lockstep.train.packing import Layout, MicroBatch, WantedTokens, plan
from lockstep.train.routing_replay import RoutingReplay
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

    ``packing`` "auto" takes the densest layout that is exact for the architecture. ``routing_replay``: the experts that
    run are those that sequences carry. The model isn't changed.
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
        routing_replay: bool = False,
    ) -> None:
        self.split = SplitModel(model)
        self.replay = RoutingReplay(model) if routing_replay else None
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

    def wanted(self, sequence: Sequence, mask: np.ndarray) -> WantedTokens:
        """What ``plan`` needs of a sequence whose log-probs at ``mask`` [T] are wanted. With replay its expert ids are
        checked (RoutingReplayError)."""
        replays = self.replay is not None and mask.any()
        return WantedTokens(sequence.tokens, mask, self.replay.check(sequence) if self.replay and replays else None)

    @contextmanager
    def own_routes(self) -> Iterator[None]:
        """Inside, nothing is replayed: the model's own routers decide."""
        replay, self.replay = self.replay, None
        try:
            yield
        finally:
            self.replay = replay

    def attention(self) -> AbstractContextManager[None]:
        """To be held over a forward *and* its backward, which may run layers again (gradient checkpointing)."""
        return row_attention(self.split.model.config) if self.flat else nullcontext()

    @contextmanager
    def running(
        self, batch: MicroBatch, sequences: Seq[Sequence], wanted: Seq[WantedTokens], *, record_routes: bool = False
    ) -> Iterator[list[list[torch.Tensor]]]:
        """``attention()`` with the expert ids of ``batch`` replayed; held over a forward and its backward as well.

        ``sequences`` and ``wanted`` are the planner's input. Yields what ``routes_of`` turns into expert ids: the
        routers' own choices, before a replay replaces them; nothing if ``record_routes`` is off.
        """
        with ExitStack() as stack:
            # Hooks run in order of registration: record first, then replace.
            records: list[list[torch.Tensor]] = []
            if record_routes:
                records = stack.enter_context(recorded_routes(self.split.model))
            if self.replay is not None:
                known = {index: routes for index in batch.members if (routes := wanted[index].routes) is not None}
                ids = self.replay.pack(batch, sequences, known)
                if self.flat and batch.segments is not None:
                    ids = ids[batch.segments.ravel() >= 0]
                stack.enter_context(self.replay.replayed(self._tensor(ids)))
            stack.enter_context(self.attention())
            yield records

    def routes_of(
        self, batch: MicroBatch, sequences: Seq[Sequence], records: list[list[torch.Tensor]]
    ) -> Iterator[tuple[str, RouteArray]]:
        """(sequence id, expert ids [T-1, L, K]) of a micro-batch's members, flagged missing at positions that it did
        not run. ``records`` are those of ``running``; nothing for a model without experts."""
        if not records:
            return
        # A backward that runs layers again records again; the first record is the forward's.
        chosen = stacked_routes([record[0] for record in records], num_experts(self.split.model))
        for index, inputs in batch.inputs.items():
            sequence = sequences[index]
            missing = np.iinfo(chosen.dtype).max
            found = np.full((len(sequence.tokens) - 1, *chosen.shape[1:]), missing, dtype=chosen.dtype)
            found[: len(inputs)] = chosen[self._model_positions(batch, inputs)]
            yield sequence.sequence_id, found

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

        ``positions`` "all" scores the prompt too, except token 0. ``routes`` adds the expert ids
        [T-1, L, K] that the model's own routers chose, flagged missing at positions that this forward did not run
        (after the last position asked for).
        """
        wanted = [self.wanted(sequence, _wanted(sequence, positions)) for sequence in sequences]
        scores = [np.full(len(sequence.tokens), np.nan, dtype=np.float32) for sequence in sequences]
        best = [np.full(len(sequence.tokens), -1, dtype=np.int32) for sequence in sequences]
        experts: dict[str, RouteArray] = {}
        for batch in self.plan(wanted):
            with self.running(batch, sequences, wanted, record_routes=routes) as records:
                output = self(batch, top1=top1)
            for index, places, where in by_sequence(batch):
                scores[index][places] = output.logprobs[where].cpu().numpy()
                if output.top1 is not None:
                    best[index][places] = output.top1[where].cpu().numpy()
            experts.update(self.routes_of(batch, sequences, records))
        return {
            sequence.sequence_id: LogProbs(
                scores[i], version, experts.get(sequence.sequence_id), best[i] if top1 else None
            )
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
