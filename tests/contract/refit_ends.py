"""Both ends of a refit over any tensors: a source of given tensors, and the embedded engine's own receiver over a
module that holds tensors of the same names. For tests of transports and of their faults."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from lockstep.records import Manifest, TensorSpec
from lockstep.rollout.receiver import TorchReceiver, dtype_name


class TensorSource:
    """``interfaces.WeightSource`` over named tensors; ``groups``: the atomic groups of those that are not alone."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], version: int, groups: Mapping[str, str] | None = None
    ) -> None:
        self.tensors, self.version, self.groups = dict(tensors), version, groups or {}

    def manifest(self) -> Manifest:
        specs = (
            TensorSpec(name, tuple(tensor.shape), dtype_name(tensor), self.groups.get(name, name))
            for name, tensor in self.tensors.items()
        )
        return Manifest(self.version, tuple(specs))

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tuple(tensor.shape), (0,) * tensor.ndim, tensor


class Held(torch.nn.Module):
    """A module that has the given tensors as buffers, under their names (which may have no dots)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.clone())


class Host:
    """The engine as its receiver knows it: what is served, or why nothing is."""

    def __init__(self) -> None:
        self.version = 0
        self.unfit: str | None = None
        self.refitting = False

    def refit_begun(self) -> None:
        self.refitting = True

    def refit_committed(self, version: int) -> None:
        self.version, self.unfit = version, None

    def refit_over(self) -> None:
        self.refitting = False

    def refit_aborted(self, reason: str) -> None:
        self.unfit, self.refitting = reason, False


class _NoDecoder:
    """A decoder that derives nothing."""

    def refresh(self) -> None:
        """Nothing to do."""

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


class RecordingReceiver(TorchReceiver):
    """The real receiver, which also notes the names of every load call."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.host = Host()
        self.calls: list[list[str]] = []
        super().__init__(Held(tensors), _NoDecoder(), self.host)  # pyright: ignore[reportArgumentType]

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        names: list[str] = []
        self.calls.append(names)

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                names.append(name)
                yield name, tensor

        super().receive(noted())


def zeros_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an engine holds before a refit."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(live: Iterable[tuple[str, torch.Tensor]], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Every tensor is there, bit for bit, and no other."""
    found = dict(live)
    return found.keys() == tensors.keys() and all(torch.equal(bits(found[n]), bits(t)) for n, t in tensors.items())


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int64)


@st.composite
def named_tensors(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Random bytes as tensors of random shapes and types, and their atomic groups (neighbours)."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors: dict[str, torch.Tensor] = {}
    groups: dict[str, str] = {}
    group = 0
    for index in range(draw(st.integers(1, 10))):
        shape = draw(st.lists(st.integers(1, 30), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        num_bytes = int(torch.empty(shape, dtype=dtype).numel() * dtype.itemsize)
        data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
        group += draw(st.booleans())
        tensors[f"t{index}"] = data.view(dtype).view(shape)
        groups[f"t{index}"] = f"g{group}"
    return tensors, groups


def shared_memory(process_id: int | None = None) -> set[str]:
    """All shared memory that a refit could leave: files of /dev/shm that bear the project's name or this process' id,
    and memory files that this or the given process has open or mapped."""
    ours = ("lockstep", str(os.getpid()))
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if any(part in name for part in ours)}
    root = Path("/proc") / str(process_id or os.getpid())
    for link in (root / "fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue  # closed since it was listed
        if "memfd:lockstep" in target:
            found.add(f"{link}: {target}")
    maps = (root / "maps").read_text().splitlines()
    return found | {line for line in maps if "memfd:lockstep" in line}


def assert_nothing_left(before: set[str]) -> None:
    """No shared memory is there that was not before, once transports have given back what they keep."""
    for transport in _made:
        transport.close()
    if shared_memory() - before:
        gc.collect()  # what a caught error's traceback still holds is no leak
    assert shared_memory() - before == set()


_made: weakref.WeakSet[Any] = weakref.WeakSet()
"""Transports that a test may still hold: what they keep for the next refit is no leak."""


def any_transport(name: str, folder: Path, *, bucket_bytes: int = 4096, timeout_s: float = 20.0) -> Any:
    """A transport by name, with small buckets."""
    from lockstep.config.schema import RefitConfig
    from lockstep.refit.transports import make_transport

    settings = RefitConfig(bucket_bytes=bucket_bytes, timeout_s=timeout_s, folder=str(folder))
    made = make_transport(name, settings)  # pyright: ignore[reportArgumentType]
    _made.add(made)
    return made
