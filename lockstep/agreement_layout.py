"""How the arguments of ``agreement.measure`` are laid out, and how they become flat tensors. Needs torch and numpy."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

PerToken = Tensor | np.ndarray | Seq[Tensor] | Seq[np.ndarray] | Seq[Seq[float]] | Seq[float]
"""Per-token values: flat [N], padded [B, T], or a list of B arrays [T_i]. All arguments of a call share one layout."""

Labels = Seq[Any] | Tensor | np.ndarray
"""One label per row ([B, T] or list) or, when flat, one per token."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Which group each token belongs to: codes [N] into ``names``; ``named`` False: rows without ids of the caller's,
    which no other measurement can mean."""

    codes: Tensor
    names: list[Any]
    named: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a call's per-token arguments, and how they become flat tensors on the device of the first."""

    lengths: tuple[int, ...]  # tokens per row; one entry when flat
    has_rows: bool
    row: Tensor  # [N]
    device: torch.device

    @classmethod
    def of(cls, values: PerToken) -> Layout:
        """The layout of ``values``. Raises ValueError for arrays of other ranks."""
        name, given = "train_logprobs", _plain(values)
        first = _tensor(name, given[0] if isinstance(given, (list, tuple)) and given else given)
        if isinstance(given, (list, tuple)):
            lengths, has_rows = tuple(len(v) for v in given), True
        elif first.dim() == 2:
            lengths, has_rows = (first.shape[1],) * first.shape[0], True
        elif first.dim() == 1:
            lengths, has_rows = (first.shape[0],), False
        else:
            raise ValueError(f"log-probs must be [N], [B, T] or a list of [T_i], not of shape {tuple(first.shape)}")
        counts = torch.tensor(lengths, dtype=torch.long, device=first.device)
        row = torch.repeat_interleave(torch.arange(len(lengths), device=first.device), counts)
        return cls(lengths, has_rows, row, first.device)

    def flat(self, name: str, values: PerToken, trailing: int = 0) -> Tensor:
        """[N, …], ``trailing`` further dimensions (routes: 2). Raises ValueError, with ``name``, for another layout."""
        given = _plain(values)
        if isinstance(given, (list, tuple)):
            lengths = tuple(len(v) for v in given)
            tensor = torch.cat([_tensor(name, v) for v in given]) if given else torch.zeros(0)
        else:
            tensor = _tensor(name, given)
            if self.has_rows and tensor.dim() >= 2:
                lengths, tensor = (tensor.shape[1],) * tensor.shape[0], tensor.flatten(0, 1)
            else:
                lengths = (tensor.shape[0],)
        if lengths != self.lengths:
            raise ValueError(f"{name} has rows of {lengths} tokens, the trainer's log-probs of {self.lengths}")
        if tensor.dim() != 1 + trailing:
            wanted = "[layers, experts] per token" if trailing else "one value per token"
            raise ValueError(f"{name} has {list(tensor.shape[1:])} values per token; needed: {wanted}")
        return tensor.detach().to(self.device)

    def codes(self, name: str, values: Labels) -> tuple[Tensor, list[Any]]:
        """(small integers [N], label of each). Raises ValueError, with ``name``, for a wrong number of labels."""
        plain = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else [_label(v) for v in values]
        expected = len(self.lengths) if self.has_rows else self.lengths[0]
        if len(plain) != expected:
            raise ValueError(f"{name} has {len(plain)} entries; needed: {expected}, one per row (or per token if flat)")
        seen: dict[Any, int] = {}
        codes = torch.tensor([seen.setdefault(v, len(seen)) for v in plain], dtype=torch.long, device=self.device)
        return codes[self.row] if self.has_rows else codes, list(seen)

    def owners(self, sequence_ids: Labels | None, rollout_ids: Labels | None) -> tuple[Owners | None, Owners | None]:
        """(sequence, rollout) of each token; each stands in for the other where only one is known."""
        rollout = None if rollout_ids is None else Owners(*self.codes("rollout_ids", rollout_ids), named=True)
        if sequence_ids is not None:
            sequence = Owners(*self.codes("sequence_ids", sequence_ids), named=True)
        elif self.has_rows:
            sequence = Owners(self.row, list(range(len(self.lengths))), named=False)
        else:
            sequence = rollout
        return sequence, sequence if rollout is None else rollout

    def mask(self, name: str, values: PerToken) -> Tensor:
        """Flat booleans [N]. Raises ValueError, with ``name``, for other numbers than 0 and 1."""
        tensor = self.flat(name, values)
        if tensor.dtype != torch.bool and not bool(((tensor == 0) | (tensor == 1)).all()):
            raise ValueError(f"{name} holds other numbers than 0 and 1: weights are no mask")
        return tensor.bool()

    def pair(
        self, name: str, train: PerToken | None, rollout: PerToken | None, trailing: int = 0
    ) -> tuple[Tensor, Tensor] | None:
        """Both sides flat, or None if neither is known. Raises ValueError if only one is, or if their trailing
        dimensions (layers, experts per token) differ."""
        if (train is None) != (rollout is None):
            raise ValueError(f"train_{name} and rollout_{name} belong together; only one was given")
        if train is None or rollout is None:
            return None
        ours = self.flat(f"train_{name}", train, trailing)
        theirs = self.flat(f"rollout_{name}", rollout, trailing)
        if ours.shape != theirs.shape:
            shapes = f"{list(ours.shape[1:])} and {list(theirs.shape[1:])}"
            raise ValueError(f"train_{name} and rollout_{name} have {shapes} values per token; they must be alike")
        return ours, theirs

    def place(self, index: int) -> tuple[int, int]:
        """(row, column) of flat token ``index`` in the caller's layout; row 0 when flat."""
        row = int(self.row[index])
        return row, index - sum(self.lengths[:row])


def ranks(masked: Tensor, sequence: Tensor | None) -> Tensor | None:
    """Rank [N] of each masked token in its sequence; None if sequences are unknown."""
    if sequence is None:
        return None
    device = sequence.device
    order = torch.argsort(sequence, stable=True)
    counted = torch.cumsum(masked[order].long(), 0) - masked[order].long()
    starts = torch.full((int(sequence.max()) + 1 if len(sequence) else 0,), len(sequence), device=device)
    starts = starts.scatter_reduce(0, sequence[order], torch.arange(len(order), device=device), "amin")
    result = torch.empty_like(counted)
    result[order] = counted - counted[starts[sequence[order]]]
    return result


def _plain(values: Any) -> Any:
    """A list of numbers as the flat array that it stands for; anything else as it is."""
    single = isinstance(values, (list, tuple)) and len(values) > 0 and np.ndim(values[0]) == 0
    return np.asarray(values) if single else values


def _tensor(name: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values
    array = np.array(values)  # a copy: may be read-only
    if array.dtype.kind not in "fiub":
        raise ValueError(
            f"{name} holds values that are no numbers ({array.dtype}): one for each token is needed; where a side has "
            "no log-prob, say NaN, and 0 in the mask if the policy did not sample the token"
        )
    wide = array.dtype.kind == "f" and array.dtype.itemsize > 8
    return torch.from_numpy(array.astype(np.float64 if wide else array.dtype.newbyteorder("="), copy=False))


def _label(value: Any) -> Any:
    """The number that a single element holds: elements of a tensor equal only themselves."""
    return value.item() if isinstance(value, (Tensor, np.generic, np.ndarray)) else value
