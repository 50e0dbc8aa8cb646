"""How the bytes of a refit travel. One class a transport, all passing the same contract tests.

``local``: same process, one copy into the engine's own storage. ``shared``: same process, the engine's parameters
become aliases of the trainer's live storage; there is no second copy to fall back on, so the receipt names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

import torch

from lockstep.interfaces import WeightReceiver, WeightSource


class Transport(Protocol):
    """Moves every tensor of a source into a receiver; returns the number of bytes moved (0 where nothing is copied)."""

    name: str

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> int: ...


class LocalTransport:
    """One copy within the process."""

    name = "local"

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> int:
        """Copy all tensors. Returns bytes as the source holds them."""
        counter = _ByteCounter()
        receiver.receive(counter.counted(whole_tensors(source)))
        return counter.num_bytes


class SharedTransport:
    """No copy: the engine aliases the trainer's live weights."""

    name = "shared"

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> int:
        """Alias all tensors. Returns 0: nothing moved."""
        receiver.alias(whole_tensors(source))
        return 0


def make_transport(name: Literal["local", "shared"]) -> Transport:
    """The transport of a configuration's name."""
    return {"local": LocalTransport, "shared": SharedTransport}[name]()


def whole_tensors(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    """The source's tensors, for transports that need each whole. Raises ValueError on a shard of one."""
    for name, global_shape, offset, tensor in source.shards():
        if tuple(tensor.shape) != global_shape or any(offset):
            raise ValueError(
                f"{name}: shard of shape {tuple(tensor.shape)} at offset {offset} of {global_shape}; "
                "this transport needs whole tensors (one trainer rank)"
            )
        yield name, tensor


class _ByteCounter:
    def __init__(self) -> None:
        self.num_bytes = 0

    def counted(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor
