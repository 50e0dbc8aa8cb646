"""What every transport is: it moves a source's tensors into a receiver and says what moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.interfaces import WeightReceiver, WeightSource
from lockstep.records import Claim
from lockstep.refit.buckets import fold


@dataclass(frozen=True, slots=True)
class Transfer:
    """What moved: bytes as the source holds them (0 where nothing is copied), buckets (0 where there are none), and
    whether digests of both ends were compared. ``same_bytes_as``: an earlier version that was sent with these very
    bytes; None if there is none, or where no digest is made."""

    num_bytes: int
    num_buckets: int
    transported: Claim
    same_bytes_as: int | None = None


class Contents:
    """What a transport sent last, so that a later version with the very same bytes is noticed: a payload that never
    changes (base weights without the adapter that is trained) makes every transfer a success and every engine stale."""

    def __init__(self) -> None:
        self._last: tuple[int, str] | None = None

    def sent(self, version: int, digests: Iterable[str]) -> int | None:
        """Note what ``version`` was sent with. Returns the lower version before it if that had the same bytes."""
        now, last = (version, fold(digests)), self._last
        self._last = now
        return last[0] if last is not None and last[1] == now[1] and last[0] < version else None


class Transport(Protocol):
    """Moves every tensor of a source into a receiver."""

    name: str

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> Transfer: ...

    def close(self) -> None:
        """Give back what it keeps from one refit to the next."""
        ...


def whole_tensors(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    """The source's tensors, for transports that need each whole. Raises ValueError on a shard of one."""
    for name, global_shape, offset, tensor in source.shards():
        if tensor.shape != global_shape or any(offset):
            raise ValueError(
                f"{name}: shard of shape {tuple(tensor.shape)} at offset {offset} of {global_shape}; "
                "this transport needs whole tensors (one trainer rank)"
            )
        yield name, tensor
