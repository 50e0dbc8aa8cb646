"""What an engine's process says of its live weights: the tensors themselves, or what they are and a digest of each.

Every method answers one kind of frame (``engine_process``): JSON data, and arrays beside it. What takes longer than a
moment is answered in parts, since silence would mean that the process hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from lockstep.interfaces import WeightReceiver
from lockstep.numerics.row_sums import tensor_digest
from lockstep.records import LiveTensor
from lockstep.rollout import messages
from lockstep.rollout.receiver import dtype_name
from lockstep.rollout.wire import Frame

Answer = tuple[Any, list[np.ndarray]]
"""JSON data and the arrays that it names."""

_LIVE_BATCH_BYTES = 64 << 20
"""Live tensors of one answer: large enough that answers are few, small beside any model."""

_DIGEST_BATCH_BYTES = 1 << 30


class ShownWeights:
    """Answers for one receiver. One look at a time."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver
        self._live: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._digest_key: int | None = None
        self._reloaded: list[tuple[str, torch.Tensor]] = []

    def live_start(self, _frame: Frame) -> Answer:
        """Begin to show all live tensors."""
        self._live = self._receiver.live()
        return None, []

    def live_next(self, _frame: Frame) -> Answer:
        """The next of them; none when all were shown."""
        described: list[dict[str, Any]] = []
        arrays: list[np.ndarray] = []
        for name, tensor in self._live:
            form, data = messages.tensor_bytes(tensor)
            described.append({"name": name, **form})
            arrays.append(data)
            if sum(array.nbytes for array in arrays) >= _LIVE_BATCH_BYTES:
                break
        return described, arrays

    def described_start(self, frame: Frame) -> Answer:
        """Begin to describe all live tensors, with digests under the frame's ``key`` unless that is None."""
        self._live, self._digest_key = self._receiver.live(), frame.header["key"]
        return None, []

    def described_next(self, _frame: Frame) -> Answer:
        """The next descriptions; none when all were given."""
        found: list[LiveTensor] = []
        num_bytes, key = 0, self._digest_key
        for name, tensor in self._live:
            digest = None if key is None else tensor_digest(tensor, key)
            found.append(LiveTensor(name, dtype_name(tensor), tuple(tensor.shape), digest))
            num_bytes += tensor.nbytes
            if key is not None and num_bytes >= _DIGEST_BATCH_BYTES:
                break
        return messages.plain(found, []), []

    def opaque(self, _frame: Frame) -> Answer:
        """Names whose layout can't be undone, with the reasons."""
        return self._receiver.opaque(), []

    def reload_add(self, frame: Frame) -> Answer:
        """Keep a tensor for ``reload_run``. All are kept until the last has come: a loader may need whole layers."""
        tensor = messages.bytes_tensor(frame.header["tensor"], frame.arrays[0])
        self._reloaded.append((frame.header["name"], tensor))
        return None, []

    def reload_run(self, _frame: Frame) -> Answer:
        """Load the kept tensors again into scratch: what differs from the live bytes."""
        tensors, self._reloaded = self._reloaded, []
        return [list(pair) for pair in self._receiver.reload_differences(tensors)], []

    def derived(self, _frame: Frame) -> Answer:
        """What the registry finds."""
        return messages.plain(self._receiver.derived(), []), []


SHOWN: dict[str, Callable[[ShownWeights, Frame], Answer]] = {
    "live_start": ShownWeights.live_start,
    "live_next": ShownWeights.live_next,
    "described_start": ShownWeights.described_start,
    "described_next": ShownWeights.described_next,
    "opaque": ShownWeights.opaque,
    "reload_add": ShownWeights.reload_add,
    "reload_run": ShownWeights.reload_run,
    "derived": ShownWeights.derived,
}
"""Which method answers which operation."""
