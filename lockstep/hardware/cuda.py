"""NVIDIA GPUs as PyTorch sees them, and what contradicts itself about them. Never fails where there are none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU; memory in bytes. ``capability`` is (major, minor), ``arch`` AMD's name of it ("" elsewhere)."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_total_bytes: int
    memory_free_bytes: int
    bf16: bool
    arch: str = ""


@dataclass(frozen=True, slots=True)
class Cuda:
    """Visible GPUs, or in ``reason`` why there are none.

    ``driver`` is the kernel driver's version (None: no driver), ``runtime`` the CUDA version that torch was built
    for. ``problems`` are contradictions to resolve: (what is wrong, way out).
    """

    gpus: tuple[Gpu, ...]
    reason: str
    driver: str | None
    runtime: str | None
    problems: tuple[tuple[str, str], ...] = ()


def detect_cuda(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> Cuda:
    """Look for NVIDIA GPUs. ``environment`` and ``root`` stand in for the process's own in tests."""
    import torch

    environment = os.environ if environment is None else environment
    driver, num_physical = _driver(root)
    problems = list(_visibility_problems(environment.get("CUDA_VISIBLE_DEVICES"), num_physical))
    runtime = torch.version.cuda
    if runtime is None:
        reason = f"torch {torch.__version__} is built without CUDA"
        if num_physical:
            problems.append(
                (
                    f"{num_physical} NVIDIA GPU(s) are here, but {reason}",
                    "install a CUDA build of torch (pytorch.org/get-started), or go on with the CPU",
                )
            )
        return Cuda((), reason, driver, runtime, tuple(problems))
    try:
        gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
    except RuntimeError as error:
        problems.append((f"CUDA does not start: {error}", "compare the driver with the CUDA version of torch"))
        return Cuda((), "CUDA does not start", driver, runtime, tuple(problems))
    reason = f"{len(gpus)} visible" if gpus else _why_none(environment, driver)
    return Cuda(gpus, reason, driver, runtime, tuple(problems))


def _gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = (properties.major, properties.minor)
    return Gpu(index, properties.name, capability, total, free, bf16=capability >= (8, 0))


def _driver(root: Path) -> tuple[str | None, int]:
    """Version of the kernel driver and the number of GPUs that it knows."""
    folder = root / "proc/driver/nvidia"
    try:
        text = (folder / "version").read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None, 0
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    gpus = folder / "gpus"
    return (match.group(1) if match else "unknown"), (len(list(gpus.iterdir())) if gpus.is_dir() else 0)


def _visibility_problems(visible: str | None, num_physical: int) -> list[tuple[str, str]]:
    """What is wrong with CUDA_VISIBLE_DEVICES. CUDA itself stops reading at the first bad index, without a word."""
    entries = [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
    numbers = [int(entry) for entry in entries if re.fullmatch(r"\d+", entry)]
    where, way_out = f"CUDA_VISIBLE_DEVICES={visible}", "unset it, or name each existing GPU once"
    problems: list[tuple[str, str]] = []
    if len(set(entries)) < len(entries):
        problems.append((f"{where} names a GPU twice", way_out))
    missing = [n for n in numbers if num_physical and n >= num_physical]
    if missing:
        problems.append((f"{where} names GPU {missing[0]}, but there are {num_physical} (from 0)", way_out))
    if "-1" in entries and len(entries) > 1:
        problems.append((f"{where}: -1 hides itself and every GPU after it", way_out))
    return problems


def _why_none(environment: Mapping[str, str], driver: str | None) -> str:
    if driver is None:
        return "no NVIDIA driver is loaded"
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    return f"driver {driver} is loaded, but torch sees no GPU"
