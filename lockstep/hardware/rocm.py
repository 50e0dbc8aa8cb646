"""AMD GPUs: what the kernel driver lists, and what PyTorch's ROCm build makes of it. Never fails where there are none.

The driver's list (``/sys/class/kfd/kfd/topology/nodes``) tells architecture and memory without a library; torch calls
AMD devices ``cuda`` and counts those that the visibility variables leave.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.hardware.cuda import Gpu
from lockstep.hardware.visibility import CUDA, HIP, ROCR, visibility_problems

NODES = "sys/class/kfd/kfd/topology/nodes"
FP8_DIALECTS = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn"}
"""FP8 of the matrix units by architecture (AMD CDNA 3 and CDNA 4 instruction set guides): MI300 and MI325 have the
dialect of exponent bias 8 and maximum 240, MI350 and MI355 the OCP one."""


@dataclass(frozen=True, slots=True)
class PhysicalGpu:
    """A GPU that the driver knows, visible to this process or not. ``arch`` as "gfx942"."""

    node: int
    arch: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Rocm:
    """Visible GPUs, or in ``reason`` why there are none; all that the driver lists; the driver's version (None: no
    driver), torch's HIP version, and contradictions: (what is wrong, way out)."""

    gpus: tuple[Gpu, ...]
    physical: tuple[PhysicalGpu, ...]
    reason: str
    driver: str | None
    runtime: str | None
    problems: tuple[tuple[str, str], ...] = ()


NO_ROCM = Rocm((), (), "no AMD driver is loaded", None, None)


def detect_rocm(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> Rocm:
    """Look for AMD GPUs. ``environment`` and ``root`` stand in for the process's own in tests."""
    import torch

    environment = os.environ if environment is None else environment
    physical, driver, runtime = physical_gpus(root), _driver(root), torch.version.hip
    problems = list(visibility_problems(environment, "rocm")) if physical else []
    if runtime is None:
        reason = f"torch {torch.__version__} is built without ROCm"
        if physical:
            wrong = f"{len(physical)} AMD GPU(s) ({physical[0].arch}) are here, but {reason}"
            problems.append((wrong, "install a ROCm build of torch (pytorch.org/get-started), or go on with the CPU"))
        return Rocm((), physical, reason if physical else _why_none(environment, driver), driver, None, tuple(problems))
    if physical and not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        problems.append(("/dev/kfd can't be opened", "add this user to the groups render and video"))
    try:
        gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
    except RuntimeError as error:
        problems.append((f"ROCm does not start: {error}", "compare the driver with the ROCm version of torch"))
        return Rocm((), physical, "ROCm does not start", driver, runtime, tuple(problems))
    reason = f"{len(gpus)} visible of {len(physical)}" if gpus else _why_none(environment, driver)
    return Rocm(gpus, physical, reason, driver, runtime, tuple(problems))


def physical_gpus(root: Path = Path("/")) -> tuple[PhysicalGpu, ...]:
    """The GPUs of the driver's list in its order; nodes without compute units are CPUs."""
    folder = root / NODES
    numbers = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.is_dir() else []
    found: list[PhysicalGpu] = []
    for number in numbers:
        properties = _properties(folder / str(number) / "properties")
        if properties.get("simd_count", 0) > 0:
            banks = (folder / str(number) / "mem_banks").glob("*/properties")
            memory = sum(_properties(bank).get("size_in_bytes", 0) for bank in banks)
            found.append(PhysicalGpu(number, architecture(properties.get("gfx_target_version", 0)), memory))
    return tuple(found)


def architecture(version: int) -> str:
    """The driver's number as a name: 90402 is gfx942 (major · 10000 + minor · 100 + stepping, the last two in
    hexadecimal)."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _properties(path: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:  # a container may show the folder and forbid the file
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _driver(root: Path) -> str | None:
    for name in ("sys/module/amdgpu/version", "sys/module/amdgpu/srcversion"):
        try:
            return (root / name).read_text().strip() or "unknown"
        except OSError:
            continue
    return "unknown" if (root / "dev/kfd").exists() else None


def _gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    arch = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    return Gpu(index, properties.name, (properties.major, properties.minor), total, free, bf16=True, arch=arch)


def _why_none(environment: Mapping[str, str], driver: str | None) -> str:
    if driver is None:
        return NO_ROCM.reason
    for name in (ROCR, HIP, CUDA):
        if environment.get(name) in ("", "-1"):
            return f"{name} hides all GPUs"
    return f"amdgpu {driver} is loaded, but torch sees no GPU"
