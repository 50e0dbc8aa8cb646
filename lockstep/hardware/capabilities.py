"""What torch and this system can do here, found by asking for it, not by comparing versions.

A release number says nothing of a nightly, a vendor's build or a back-port. Each capability says what is done where it
is missing.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
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
        memory_saver(gpus, vendor),
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


LARGE_BYTES = 8 << 30
"""One allocation larger than HIP maps in one piece."""

_SAVER_PROBE = """
import sys, torch, torch_memory_saver
saver = torch_memory_saver.torch_memory_saver
saver.hook_mode = "torch"
with saver.region():
    tensor = torch.ones(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
before = torch.cuda.mem_get_info()[0]
saver.pause()
freed = torch.cuda.mem_get_info()[0] - before
saver.resume()
tensor.fill_(1)
torch.cuda.synchronize()
sys.exit(0 if freed > 0.9 * tensor.numel() else f"a pause freed {freed} of {tensor.numel()} bytes")
"""


def large_allocation_problem() -> str | None:
    """What goes wrong with one large allocation under torch_memory_saver that is paused and resumed, in a process of
    its own, since the saver ends it on an error; None where nothing does."""
    command = [sys.executable, "-c", _SAVER_PROBE, str(LARGE_BYTES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]


def memory_saver(
    gpus: tuple[Gpu, ...],
    vendor: str,
    find: Callable[[str], object | None] = importlib.util.find_spec,
    problem: Callable[[], str | None] = large_allocation_problem,
) -> Capability:
    """The extension by which SGLang gives its memory back. On HIP large allocations must be made in chunks, which not
    every build does (fzyzcjy/torch_memory_saver#65): there it counts as missing unless a large one was tried."""
    name, otherwise = (
        "engine memory saver",
        "SGLang keeps its memory: plan for both, or place it apart from the trainer",
    )
    if not gpus:
        return Capability(name, False, "no GPU", otherwise)
    if find("torch_memory_saver") is None:
        return Capability(name, False, "torch_memory_saver is missing", otherwise)
    if vendor != "amd":
        return Capability(name, True, "torch_memory_saver is there", otherwise)
    if gpus[0].memory_free_bytes < 4 * LARGE_BYTES:
        return Capability(name, False, "not tried: less than four large allocations are free", otherwise)
    wrong = problem()
    tried = f"{LARGE_BYTES >> 30} GiB in one piece, paused and resumed"
    return Capability(name, wrong is None, f"{tried}: {wrong or 'freed and came back'}", otherwise)
