"""A transfer through memory that both processes reach: one buffer is filled while the other is loaded.

sender    fill 0 │ fill 1 │ wait for 0 │ fill 2 │ wait for 1 │ fill 3 …
receiver         │ check and load 0    │ check and load 1    │ …
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lockstep.interfaces import WeightReceiver, WeightSource
from lockstep.refit.buckets import TRAILER_BYTES, Filler, plan_buckets, seal
from lockstep.refit.conversation import IN_FLIGHT, Conversation, peer_of
from lockstep.refit.transfer import Transfer, whole_tensors


class Buffer(Protocol):
    """Memory that both ends can reach."""

    @property
    def tensor(self) -> torch.Tensor:
        """The memory: flat uint8."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the other end needs to reach it."""
        ...

    def close(self) -> None:
        """This end is done with it."""
        ...


class BucketTransport:
    """The transports whose buckets lie in memory of kind ``allocate``: ``shm`` and ``cuda_ipc``."""

    def __init__(self, name: str, allocate: Callable[[int], Buffer], *, bucket_bytes: int, timeout_s: float) -> None:
        self.name = name
        self._allocate = allocate
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> Transfer:
        """Move all tensors; the memory is given back whatever happens."""
        manifest = source.manifest()
        plan = plan_buckets(manifest, self._bucket_bytes)
        capacity = max((bucket.num_bytes for bucket in plan), default=0) + TRAILER_BYTES
        buffers: list[Buffer] = []
        transfer_id = secrets.randbits(62)
        try:
            buffers.extend(self._allocate(capacity) for _ in plan[:IN_FLIGHT])
            talk = Conversation(peer_of(receiver, manifest), self._timeout_s)
            talk.open({
                "transport": self.name,
                "transfer": transfer_id,
                "bucket_bytes": self._bucket_bytes,
                "buffers": [buffer.describe() for buffer in buffers],
            })  # fmt: skip
            filler = Filler(whole_tensors(source))
            for bucket in plan:
                talk.make_room()
                index = bucket.number % IN_FLIGHT
                filler.fill(bucket, buffers[index].tensor)
                digest = seal(bucket, buffers[index].tensor, transfer=transfer_id, version=manifest.version)
                talk.send(bucket.number, digest, {"buffer": index})
            filler.finish()
            claim = talk.close()
        finally:
            for buffer in buffers:
                buffer.close()
        return Transfer(sum(slot.num_bytes for bucket in plan for slot in bucket.slots), len(plan), claim)
