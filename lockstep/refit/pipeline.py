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
from lockstep.refit.arrivals import KEPT_BYTES
from lockstep.refit.buckets import TRAILER_BYTES, Filler, content, plan_buckets, seal
from lockstep.refit.conversation import IN_FLIGHT, Conversation, peer_of
from lockstep.refit.transfer import Contents, Transfer, whole_tensors


class Buffer(Protocol):
    """Memory that both ends can reach."""

    @property
    def tensor(self) -> torch.Tensor:
        """The memory: flat uint8."""
        ...

    @property
    def num_bytes(self) -> int:
        """Its size."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the other end needs to reach it."""
        ...

    def close(self) -> None:
        """This end is done with it."""
        ...


class BucketTransport:
    """The transports whose buckets lie in memory of kind ``allocate``: ``shm`` and ``cuda_ipc``.

    Its buffers stay for the next transfer unless they are large or something failed; they go with it or by ``close``.
    """

    def __init__(self, name: str, allocate: Callable[[int], Buffer], *, bucket_bytes: int, timeout_s: float) -> None:
        self.name = name
        self._allocate = allocate
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._kept: list[Buffer] = []
        self._contents = Contents()

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> Transfer:
        """Move all tensors. After a failure, or if it is much, the memory is given back."""
        manifest = source.manifest()
        plan = plan_buckets(manifest, self._bucket_bytes)
        capacity = max((bucket.num_bytes for bucket in plan), default=0) + TRAILER_BYTES
        transfer_id = secrets.randbits(62)
        done = False
        try:
            buffers = self._buffers(min(IN_FLIGHT, len(plan)), capacity)
            talk = Conversation(peer_of(receiver, manifest), self._timeout_s)
            talk.open({
                "transport": self.name,
                "transfer": transfer_id,
                "bucket_bytes": self._bucket_bytes,
                "buffers": [buffer.describe() for buffer in buffers],
            })  # fmt: skip
            filler = Filler(whole_tensors(source))
            contents: list[str] = []
            for bucket in plan:
                talk.make_room()
                index = bucket.number % IN_FLIGHT
                tensor = buffers[index].tensor
                sums = filler.fill(bucket, tensor)
                digest = seal(bucket, tensor, transfer=transfer_id, version=manifest.version, sums=sums)
                contents.append(content(bucket, tensor, sums))
                talk.send(bucket.number, digest, {"buffer": index})
            filler.finish()
            claim = talk.close()
            done = True
        finally:
            if not done or capacity > KEPT_BYTES:
                self.close()
        num_bytes = sum(slot.num_bytes for bucket in plan for slot in bucket.slots)
        return Transfer(num_bytes, len(plan), claim, self._contents.sent(manifest.version, contents))

    def close(self) -> None:
        """Give the memory back."""
        kept, self._kept = self._kept, []
        for buffer in kept:
            buffer.close()

    def __del__(self) -> None:
        self.close()

    def _buffers(self, count: int, capacity: int) -> list[Buffer]:
        """Kept buffers if they suffice, else new ones in their place."""
        if len(self._kept) < count or any(buffer.num_bytes < capacity for buffer in self._kept):
            self.close()
            for _ in range(count):
                self._kept.append(self._allocate(capacity))
        return self._kept[:count]
