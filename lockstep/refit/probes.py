"""Probe sequences: fixed tokens on which two sides are compared after a refit, and weights that differ on purpose.

Probes are seeded random tokens, so that every run, process and engine scores the same ones. A probe proves something
about an expert only if it passes through it: their *coverage* is counted by the experts that the reference's own
routers choose, and probes are added until it suffices. Most are short; one is long enough for every compressor of an
architecture to have closed windows (DeepSeek-V4: both compressions, 4 and 128 tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.interfaces import LogProbs, WeightSource
from lockstep.records import Manifest, Sequence, signed_routes
from lockstep.refit.transports import whole_tensors

Score = Callable[[Seq[Sequence]], Mapping[str, LogProbs]]
"""Log-probs of sequences by id; with expert ids for a model that has experts, where coverage is asked for."""

NUM_PROBES = 3
PROBE_TOKENS = 16
MAX_PROBES = 256
WANTED_COVERAGE = 0.95
LONG_PROBES = {"deepseek_v4": 272}
"""Tokens that one probe must have for every part of an architecture to act, where its context allows."""
MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which (layer, expert) pairs the probes pass through; a dense model has no pairs and is covered by any token."""

    num_pairs: int
    missing: tuple[tuple[int, int], ...]  # (layer of experts, expert)
    longest: int  # tokens of the longest probe
    wanted_tokens: int  # what the architecture needs for every part to act; 0: nothing special
    indexer_tokens: int = 0  # below this many, sparse indexers keep every key; 0: there are none

    @property
    def share(self) -> float:
        """Reached pairs among all; 1 for a dense model."""
        return 1 - len(self.missing) / self.num_pairs if self.num_pairs else 1.0

    def text(self) -> str:
        """In words: what is reached, and what is not."""
        said = "every layer"
        if self.num_pairs:
            reached = self.num_pairs - len(self.missing)
            said = f"{reached} of {self.num_pairs} (layer, expert) pairs"
            if self.missing:
                names = ", ".join(f"{layer}/{expert}" for layer, expert in self.missing[:MAX_NAMED])
                said += f", not {names}{' …' if len(self.missing) > MAX_NAMED else ''}"
        if self.longest < self.wanted_tokens:
            said += (
                f"; {self.longest} tokens at most, the architecture needs {self.wanted_tokens} for every part to act"
            )
        if self.longest < self.indexer_tokens:
            said += (
                f"; {self.longest} tokens at most, so the sparse indexers kept every key: what they choose, from "
                f"{self.indexer_tokens} tokens on, is not covered"
            )
        return said


@dataclass(frozen=True, slots=True)
class Probes:
    """Sequences whose tokens all count but the first, and what they cover."""

    sequences: tuple[Sequence, ...]
    coverage: Coverage

    @property
    def num_tokens(self) -> int:
        """Tokens that are compared."""
        return sum(int(s.loss_mask.sum()) for s in self.sequences)


def make_probes(
    score: Score,
    *,
    vocab_size: int,
    num_experts: int = 0,
    context: int | None = None,
    model_type: str = "",
    indexer_tokens: int = 0,
    padding_id: int | None = None,
    seed: int = 0,
    max_probes: int = MAX_PROBES,
) -> Probes:
    """Probes for a model. Beyond the first few, only those that reach another expert are kept, until
    ``WANTED_COVERAGE`` of them is reached, ``max_probes`` were tried, or twice as many reach nothing new.

    ``score`` is the reference's; its routes count. ``num_experts`` 0: dense. ``context`` limits their length.
    ``indexer_tokens``: see the function of this name. Probes of thousands of tokens would cost more than all others:
    they are not made longer for it, and the coverage says so. ``padding_id`` is left out: a random model embeds it as
    zeros, so that an indexer scores every key alike and its top-k is a toss. Raises
    ValueError if a model with experts reports no routes.
    """
    room = context or 1 << 20
    wanted = LONG_PROBES.get(model_type, 0)
    lengths = [min(PROBE_TOKENS, room)] * (NUM_PROBES - 1) + [min(max(wanted, PROBE_TOKENS), room)]
    random = np.random.default_rng(seed)
    allowed = np.array([token for token in range(vocab_size) if token != padding_id])
    sequences = [_probe(i, random, length, allowed) for i, length in enumerate(lengths)]
    num_made, reached = len(sequences), None
    if num_experts:
        reached = _reached(score(sequences), sequences, num_experts).any(axis=0)
        while reached.mean() < WANTED_COVERAGE and 2 * num_made <= max_probes:
            new = [_probe(num_made + i, random, lengths[0], allowed) for i in range(num_made)]
            before, num_made = reached, 2 * num_made
            for sequence, found in zip(new, _reached(score(new), new, num_experts), strict=True):
                if (found & ~reached).any():
                    sequences.append(sequence)
                    reached = reached | found
            if (before == reached).all():
                break  # the rest is out of reach of random tokens
    coverage = Coverage(
        num_pairs=0 if reached is None else reached.size,
        missing=() if reached is None else tuple((int(a), int(b)) for a, b in np.argwhere(~reached)),
        longest=max(len(s.tokens) for s in sequences),
        wanted_tokens=wanted,
        indexer_tokens=indexer_tokens,
    )
    return Probes(tuple(sequences), coverage)


def indexer_tokens(config: Any) -> int:
    """Tokens that a sequence must have for a sparse indexer to leave a key out where that shows; 0 without indexers.

    ``config``: a text model's. Its ``index_topk`` keys are kept, of those before a token, or of the windows before it
    (DeepSeek-V4's compressed sparse attention); what follows the last token is not scored.
    """
    kept = getattr(config, "index_topk", None)
    rates = getattr(config, "compress_rates", None) or {}
    return 0 if kept is None else rates.get("compressed_sparse_attention", 1) * (kept + 1) + 1


def _probe(index: int, random: np.random.Generator, length: int, allowed: np.ndarray) -> Sequence:
    tokens = random.choice(allowed, length).astype(np.int32)
    zeros = np.zeros(length, np.int32)
    return Sequence(f"probe/{index}", tokens, np.arange(length) > 0, np.zeros(length, np.float32), zeros, zeros)


def _reached(scored: Mapping[str, LogProbs], sequences: Seq[Sequence], num_experts: int) -> np.ndarray:
    """[sequences, L, E] whether any token of the sequence went to the expert."""
    reached = []
    for sequence in sequences:
        routes = scored[sequence.sequence_id].routes
        if routes is None:
            raise ValueError("the reference reports no expert ids: coverage of the probes can't be counted")
        ids = signed_routes(routes)  # [T-1, L, K]
        found = np.zeros((ids.shape[1], num_experts), dtype=np.bool_)
        for layer in range(ids.shape[1]):
            chosen = ids[:, layer].ravel()
            found[layer, chosen[chosen >= 0]] = True
        reached.append(found)
    return np.stack(reached)


# --- weights that differ on purpose -----------------------------------------------------------------------------------


class OtherWeights:
    """The same tensors with other values everywhere: what an engine must have lost after the next refit.

    An engine is refitted with these first, so that the check of the real weights has power: whatever does not arrive
    shows. Scaled by 7/8 and 5/8 like a chessboard over the last two dimensions. One factor for all would leave much
    unseen: a projection before a norm (q and k of Qwen3, the latents of MLA) and an indexer, whose top-k is taken, give
    the same for every multiple of their weights. Factors below 1 make the network tamer, not wilder: with 5/4, thirty
    layers in bfloat16 differ by a nat between two batch compositions. Zeros become 2⁻⁵ and −2⁻⁵ in turn, since neither
    a router's choice nor a softmax depends on what all its biases share. What is no floating point (a table of expert
    ids) is turned round.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def manifest(self) -> Manifest:
        """The source's: names, shapes and version are the same."""
        return self._source.manifest()

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """The source's shards with other values, each a new tensor."""
        for name, shape, offset, tensor in self._source.shards():
            yield name, shape, offset, _other(tensor, offset)


def _other(tensor: torch.Tensor, offset: tuple[int, ...]) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.flip(0)
    sign = torch.ones((), dtype=tensor.dtype, device=tensor.device)
    for start, size in list(zip(offset, tensor.shape, strict=True))[-2:]:
        place = torch.arange(start, start + size, device=tensor.device)
        sign = sign[..., None] * (1 - 2 * (place % 2)).to(tensor.dtype)
    changed = torch.where(tensor == 0, 2.0**-5 * sign, tensor * (0.75 + 0.125 * sign))
    return changed.to(tensor.dtype)


@contextmanager
def holding(model: torch.nn.Module, source: WeightSource) -> Iterator[None]:
    """While the block runs, the module computes with the source's tensors (module names). Pointers are swapped and put
    back, no weight is written."""
    own = model.state_dict(keep_vars=True)
    with _swapped({name: (own[name], tensor) for name, tensor in whole_tensors(source)}):
        yield


@contextmanager
def holding_live(model: torch.nn.Module, live: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """The same with what an engine shows as live; of several names of one storage the first counts."""
    own = model.state_dict(keep_vars=True)
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in live:
        first.setdefault(own[name].data_ptr() or id(own[name]), (name, tensor))
    with _swapped({name: (own[name], tensor) for name, tensor in first.values()}):
        yield


@contextmanager
def _swapped(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    before = {name: own.data for name, (own, _) in pairs.items()}
    try:
        for own, given in pairs.values():
            own.data = given.to(own.dtype)  # dequantised weights are float32
        yield
    finally:
        for name, (own, _) in pairs.items():
            own.data = before[name]
