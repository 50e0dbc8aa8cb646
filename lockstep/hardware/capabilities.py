"""What torch and this system can do here, found by asking for it, not by comparing versions.

A release number says nothing of a nightly, a vendor's build or a back-port. Each capability says what is done where it
is missing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.hardware.cuda import Gpu
from lockstep.hardware.rocm import FP8_DIALECTS


@dataclass(frozen=True, slots=True)
class Capability:
    """``present`` here or not, what was looked at (``reason``), and what happens where it is missing."""

    name: str
    present: bool
    reason: str
    otherwise: str


def capabilities(gpus: tuple[Gpu, ...] = (), vendor: str = "cpu") -> tuple[Capability, ...]:
    """All of them. ``gpus`` are the visible ones; ``vendor`` is "nvidia", "amd" or "cpu"."""
    return (
        mesh_unflatten(),
        collectives(vendor),
        grouped_product(),
        fp8(gpus, vendor),
        memory_handles(gpus),
        shared_memory(),
        sleep_mode(gpus),
    )


def mesh_unflatten(mesh_class: Any = None) -> Capability:
    """Whether an axis of a device mesh can be split in two. The method is private: it may go."""
    if mesh_class is None:
        from torch.distributed.device_mesh import DeviceMesh as mesh_class
    present = callable(getattr(mesh_class, "_unflatten", None))
    reason = "DeviceMesh._unflatten is there" if present else "DeviceMesh has no _unflatten"
    return Capability("split mesh axes", present, reason, "a mesh of two axes is built from the start")


def collectives(vendor: str) -> Capability:
    """A back end of torch.distributed for the devices here."""
    import torch.distributed as dist

    if not dist.is_available():
        return Capability("collectives", False, "torch is built without torch.distributed", "one process only")
    wanted = "gloo" if vendor == "cpu" else "nccl"  # ROCm builds call RCCL nccl
    present = dist.is_gloo_available() if wanted == "gloo" else dist.is_nccl_available()
    return Capability("collectives", present, f"{wanted} is {'there' if present else 'missing'}", "one process only")


def grouped_product() -> Capability:
    """One product for all experts of a layer, private in torch so far."""
    import torch

    present = callable(getattr(torch, "_grouped_mm", None))
    reason = "torch._grouped_mm is there" if present else "torch has no _grouped_mm"
    return Capability("grouped matrix product", present, reason, "experts are multiplied one after the other")


def fp8(gpus: tuple[Gpu, ...], vendor: str) -> Capability:
    """FP8 in the matrix units, and in which dialect."""
    otherwise = "fp8 weights are multiplied after dequantisation"
    if vendor == "amd" and gpus:
        dialect = FP8_DIALECTS.get(gpus[0].arch)
        reason = f"{gpus[0].arch}: {dialect or 'no fp8'}"
        if dialect == "e4m3fnuz":
            otherwise = "checkpoints in e4m3fn are converted, with their scales doubled"
        return Capability("fp8 products", dialect is not None, reason, otherwise)
    if vendor == "nvidia" and gpus:
        present = gpus[0].capability >= (8, 9)
        shown = ".".join(str(part) for part in gpus[0].capability)
        return Capability("fp8 products", present, f"capability {shown}: {'e4m3fn' if present else 'none'}", otherwise)
    return Capability("fp8 products", False, "no GPU", otherwise)


def memory_handles(gpus: tuple[Gpu, ...]) -> Capability:
    """GPU memory that another process can open; asked of a small tensor, since expandable segments refuse it."""
    otherwise = "transport cuda_ipc is refused: shm goes through memory of the host"
    if not gpus:
        return Capability("memory handles between processes", False, "no GPU", otherwise)
    import torch

    try:
        torch.empty(1, device="cuda").untyped_storage()._share_cuda_()
    except RuntimeError as error:
        return Capability("memory handles between processes", False, str(error).splitlines()[0], otherwise)
    return Capability("memory handles between processes", True, "a tensor's memory can be shared", otherwise)


def shared_memory(create: Callable[[str], int] | None = None) -> Capability:
    """Anonymous shared memory, which ends with the processes that hold it."""
    make = create if create is not None else getattr(os, "memfd_create", None)
    otherwise = "transport shm is refused: disk goes through files"
    if make is None:
        return Capability("anonymous shared memory", False, "this system has no memfd_create", otherwise)
    try:
        os.close(make("lockstep-probe"))
    except OSError as error:
        return Capability("anonymous shared memory", False, f"memfd_create: {error.strerror}", otherwise)
    return Capability("anonymous shared memory", True, "memfd_create works", otherwise)


def sleep_mode(gpus: tuple[Gpu, ...], find: Callable[[str], object | None] = importlib.util.find_spec) -> Capability:
    """An engine that gives its GPU memory back between rollouts: vLLM needs an extension that not every build has."""
    otherwise = "the engine keeps its memory: plan for both, or place it apart from the trainer"
    if not gpus:
        return Capability("engine sleep", False, "no GPU", otherwise)
    present = find("vllm") is not None and find("vllm.cumem_allocator") is not None
    reason = "vllm.cumem_allocator is " + ("there" if present else "missing")
    return Capability("engine sleep", present, reason, otherwise)
