"""Log-probs of given tokens from hidden states, without ever holding [N, V] logits.

The head runs on chunks of rows. Its gradient needs the probabilities again; they are recomputed chunk by chunk in the
backward, except for the last chunk of the forward, whose logits are kept: a micro-batch whose rows fit one chunk
recomputes nothing, and never more than one chunk of logits exists at any moment. (Keeping all of them in bfloat16
would save one matrix product in four and cost N·V·2 bytes.)

Rows and tokens are apart: several tokens may be predicted by one row (samples that share a prompt), and the row's
softmax is then computed once. Everything after the head's own matrix product is float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.model.adapter import SplitModel
from lockstep.model.head import Float32Head

_BLOCK_ELEMENTS = 1 << 22
"""Float32 elements of one softmax block: 16 MB. Smaller blocks don't compute faster, and each of their many operations
waits for all threads. Blocks and logits live in buffers that are used again: fresh pages would cost a CPU more than the
arithmetic."""


class TokenLogProbs:
    """The head of ``split`` as a function from hidden rows to log-probs of tokens.

    Log-probs are float32 of the sampling distribution: logits divided by ``temperature``, columns from
    ``vocab_limit`` on left out of the softmax. A head that is a plain linear (proved here by comparing it with the
    model's own head on random rows) has a hand-written gradient; any other runs the model's own head, checkpointed.
    The head's weight gradient is summed over chunks in float32 and handed on in the weight's dtype.
    """

    def __init__(
        self, split: SplitModel, *, temperature: float = 1.0, vocab_limit: int | None = None, chunk_tokens: int = 512
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature {temperature}: log-probs of a sampling distribution need one above 0")
        self.split = split
        self.inverse_temperature = 1.0 / temperature
        self.chunk_tokens = chunk_tokens
        self.linear = _is_plain_linear(split)
        # Heads of several layers (RoBERTa) know their last one.
        width = split.model.get_output_embeddings().weight.shape[0]  # pyright: ignore
        if vocab_limit is not None and not 0 < vocab_limit <= width:
            raise ValueError(f"vocab_limit {vocab_limit}: the head has {width} rows")
        self.vocab_limit = vocab_limit

    def __call__(self, hidden: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probs [M] float32 of ``tokens`` [M], token i predicted by row ``rows[i]`` of ``hidden`` [n, H].

        ``rows`` must not decrease. Raises ValueError for a token beyond ``vocab_limit``: its probability is zero.
        """
        self._check(tokens)
        if len(tokens) == 0:
            return hidden.new_zeros(0, dtype=torch.float32) + 0.0 * hidden.float().sum()
        if self.linear:
            head = self.split.model.lm_head
            weight: torch.Tensor = head.weight  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
            if isinstance(head, Float32Head):
                hidden, weight = hidden.float(), weight.float()
            return _LinearHead.apply(  # pyright: ignore[reportReturnType]
                hidden, weight, rows, tokens, self.inverse_temperature, self.vocab_limit, self.chunk_tokens
            )
        outputs = []
        for start, stop, low, high in _chunks(hidden.shape[0], rows, self.chunk_tokens):
            arguments = (hidden[start:stop], rows[low:high] - start, tokens[low:high])
            if torch.is_grad_enabled():
                outputs.append(checkpoint(self._own_head, *arguments, use_reentrant=False))
            else:
                outputs.append(self._own_head(*arguments))
        return torch.cat(outputs)

    def argmax(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The most likely token [M] int64 at each of ``rows`` [M] of ``hidden`` [n, H]; the lowest id on a tie."""
        best = [
            self.split.logits(piece)[:, : self.vocab_limit].float().argmax(-1)
            for piece in hidden.detach().split(self.chunk_tokens)
        ]
        return torch.cat(best)[rows]

    def _own_head(self, hidden: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.split.logits(hidden)[:, : self.vocab_limit].float() * self.inverse_temperature
        return logits[rows, tokens] - logits.logsumexp(-1)[rows]

    def _check(self, tokens: torch.Tensor) -> None:
        if self.vocab_limit is not None and len(tokens) and int(tokens.max()) >= self.vocab_limit:
            raise ValueError(
                f"token {int(tokens.max())} was sampled but the vocabulary ends at {self.vocab_limit}: "
                "the engine must mask the same rows of the head"
            )


def _is_plain_linear(split: SplitModel) -> bool:
    """Probes are small and large: a soft cap (Gemma 2) bends large logits alone."""
    head = split.model.lm_head
    if type(head) not in (torch.nn.Linear, Float32Head) or head.bias is not None:
        return False
    with torch.no_grad():
        generator = torch.Generator(device="cpu").manual_seed(0)
        sizes = torch.tensor([1.0, 30.0, 1e3, 3e4])
        probe = (sizes[:, None] * torch.randn(4, head.in_features, generator=generator)).to(head.weight)
        expected = split.logits(probe)
        found = head(probe)
    return expected.shape == found.shape and torch.allclose(expected.float(), found.float(), rtol=1e-3, atol=1e-5)


def _chunks(num_rows: int, rows: torch.Tensor, size: int) -> list[tuple[int, int, int, int]]:
    """(first row, last row + 1, first token, last token + 1) of each chunk of ``size`` rows."""
    edges = [*range(0, num_rows, size), num_rows]
    places = torch.searchsorted(rows, torch.tensor(edges, device=rows.device)).tolist()
    return [(edges[i], edges[i + 1], places[i], places[i + 1]) for i in range(len(edges) - 1)]


def _scratch(vocabulary: int, num_rows: int, device: torch.device) -> torch.Tensor:
    """Float32 block [rows, V] for one softmax: a few megabytes on a CPU, a whole chunk elsewhere."""
    fitting = max(1, _BLOCK_ELEMENTS // vocabulary) if device.type == "cpu" else num_rows
    return torch.empty(min(fitting, num_rows), vocabulary, dtype=torch.float32, device=device)


def _blocks(
    logits: torch.Tensor, scratch: torch.Tensor, inverse_temperature: float
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first row, last row + 1, their scaled logits in ``scratch``) over all rows of ``logits``."""
    for first in range(0, logits.shape[0], scratch.shape[0]):
        last = min(first + scratch.shape[0], logits.shape[0])
        part = scratch[: last - first].copy_(logits[first:last])
        if inverse_temperature != 1.0:
            part.mul_(inverse_temperature)
        yield first, last, part


class _LinearHead(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[rows, tokens] with the gradient of hidden and weight, in chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        inverse_temperature: float,
        vocab_limit: int | None,
        chunk_tokens: int,
    ) -> torch.Tensor:
        used = weight[:vocab_limit]
        normalisers = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        output = torch.empty(tokens.shape[0], dtype=torch.float32, device=hidden.device)
        buffer = hidden.new_empty(min(chunk_tokens, hidden.shape[0]), used.shape[0])
        scratch = _scratch(used.shape[0], buffer.shape[0], hidden.device)
        chunks = _chunks(hidden.shape[0], rows, chunk_tokens)
        for start, stop, low, high in chunks:
            logits = torch.mm(hidden[start:stop], used.T, out=buffer[: stop - start])
            for first, last, part in _blocks(logits, scratch, inverse_temperature):
                top = part.amax(-1, keepdim=True)
                total = part.sub_(top).exp_().sum(-1)
                normalisers[start + first : start + last] = total.log_().add_(top[:, 0])
            local = rows[low:high]
            picked = logits[local - start, tokens[low:high]].float() * inverse_temperature
            output[low:high] = picked - normalisers[local]
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ctx.save_for_backward(hidden, weight, rows, tokens, normalisers)
        ctx.buffer = buffer if needs_gradient else None  # still holds the last chunk's logits
        ctx.chunks = chunks
        ctx.inverse_temperature, ctx.vocab_limit = inverse_temperature, vocab_limit
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, rows, tokens, normalisers = ctx.saved_tensors
        used = weight[: ctx.vocab_limit]
        scaled_gradient = gradients[0].float() * ctx.inverse_temperature
        # d log p[token] / d logits = (onehot(token) - p) / temperature: the softmax part is summed over a row's tokens.
        row_weights = torch.zeros_like(normalisers).index_add_(0, rows, scaled_gradient)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient: torch.Tensor | None = None
        kept, ctx.buffer = ctx.buffer, None
        buffer = kept if kept is not None else hidden.new_empty(ctx.chunks[0][1], used.shape[0])
        scratch = _scratch(used.shape[0], buffer.shape[0], hidden.device)
        for start, stop, _, _ in reversed(ctx.chunks):
            logits = buffer[: stop - start]
            if kept is None or start != ctx.chunks[-1][0]:
                torch.mm(hidden[start:stop], used.T, out=logits)
            for first, last, part in _blocks(logits, scratch, ctx.inverse_temperature):
                here = slice(start + first, start + last)
                part.sub_(normalisers[here, None]).exp_().mul_(-row_weights[here, None])
                edges = torch.tensor([here.start, here.stop], device=rows.device)
                left, right = torch.searchsorted(rows, edges).tolist()
                places = (rows[left:right] - here.start, tokens[left:right])
                part.index_put_(places, scaled_gradient[left:right], accumulate=True)
                logits[first:last] = part
            if hidden_gradient is not None:
                torch.mm(logits, used, out=hidden_gradient[start:stop])
            if ctx.needs_input_grad[1]:
                share = logits.T @ hidden[start:stop]
                if weight_gradient is None:
                    weight_gradient = share if len(ctx.chunks) == 1 else share.float()
                else:
                    weight_gradient += share
        if weight_gradient is not None:
            missing = weight.shape[0] - weight_gradient.shape[0]
            weight_gradient = (
                F.pad(weight_gradient.to(weight.dtype), (0, 0, 0, missing)) if missing else weight_gradient
            )
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None, None, None
