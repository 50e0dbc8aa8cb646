"""What every transport is: it moves a source's tensors into a receiver and says what moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.interfaces import WeightReceiver, WeightSource
from lockstep.records import Claim


@dataclass(frozen=True, slots=True)
class Transfer:
    """What moved: bytes as the source holds them (0 where nothing is copied), buckets (0 where there are none), and
    whether digests of both ends were compared."""

    num_bytes: int
    num_buckets: int
    transported: Claim


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
        if tuple(tensor.shape) != global_shape or any(offset):
            raise ValueError(
                f"{name}: shard of shape {tuple(tensor.shape)} at offset {offset} of {global_shape}; "
                "this transport needs whole tensors (one trainer rank)"
            )
        yield name, tensor
