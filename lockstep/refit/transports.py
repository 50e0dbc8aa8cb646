"""How the bytes of a refit travel. One class a transport, all passing the same contract tests.

``local``: same process, one copy into the engine's own storage. ``shared``: same process, the engine's parameters
become aliases of the trainer's live storage; there is no second copy to fall back on, so the receipt names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

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


class LocalTransport:
    """One copy within the process."""

    name = "local"

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> Transfer:
        """Copy all tensors."""
        counter = _ByteCounter()
        receiver.receive(counter.counted(whole_tensors(source)))
        return Transfer(counter.num_bytes, 0, _no_wire(self.name))


class SharedTransport:
    """No copy: the engine aliases the trainer's live weights."""

    name = "shared"

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> Transfer:
        """Alias all tensors: nothing moves."""
        receiver.alias(whole_tensors(source))
        return Transfer(0, 0, _no_wire(self.name))


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


def _no_wire(transport: str) -> Claim:
    return Claim("transported", "not checked", f"transport {transport} stays within the process: there is no wire")


class _ByteCounter:
    def __init__(self) -> None:
        self.num_bytes = 0

    def counted(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor
