"""What the scheduler asks of a decoder: prefill prompts, place them in slots, decode all slots by one token.

Two decoders exist: ``module_decoder`` runs any causal model of transformers through its own forward, ``fast_decoder``
is hand-written for the architectures it names. Both prefill through the model's own modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One sequence after its forward: ``hidden`` [T, H], expert ids [T, L, K] int16 if asked for, and the cached keys
    and values (decoder's own form; None if not asked for)."""

    hidden: torch.Tensor
    routes: np.ndarray | None
    cache: Any


class DecoderState(Protocol):
    """Cached keys and values of the sequences being decoded, one per slot."""

    def place(self, prefilled: Prefilled, slots: Sequence[int]) -> None:
        """Give each of ``slots`` a copy of a prefilled sequence's cache."""
        ...

    def decode(self, slots: Sequence[int], tokens: torch.Tensor, want_routes: bool) -> tuple[torch.Tensor, Any]:
        """Append ``tokens`` [n] int64 to ``slots``; logits [n, V] of the next token and routes [n, L, K] or None.
        ``slots`` are all the occupied ones, each once."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """Forget the sequences of ``slots``."""
        ...


class Decoder(Protocol):
    """A model's computation over its live weights."""

    def prefill(
        self, sequences: Sequence[torch.Tensor], *, keep_cache: bool, want_routes: bool, max_tokens: int
    ) -> list[Prefilled]:
        """Run whole sequences (each [T] int64), batched as the architecture allows within ``max_tokens``."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of hidden states [n, H], cut to the vocabulary limit."""
        ...

    def new_state(self, num_slots: int) -> DecoderState:
        """An empty cache for ``num_slots`` sequences."""
        ...

    def refresh(self) -> None:
        """Rebuild whatever is derived from the weights (after a refit)."""
        ...

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights that decode from a layout of their own, under state-dict names, that layout undone."""
        ...
