"""Which devices a process may see: one resolver for the three variables that different layers set.

On NVIDIA, ``CUDA_VISIBLE_DEVICES`` selects. On AMD there are two steps (ROCm documentation, *GPU isolation
techniques*): ``ROCR_VISIBLE_DEVICES`` selects in the runtime, and ``HIP_VISIBLE_DEVICES`` then selects, and counts,
among those; HIP takes ``CUDA_VISIBLE_DEVICES`` for the same where its own is not set. Ray sets one or another of them
by its version, so that a second one from the shell leads to wrong devices without a word: two that disagree are
an error here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

Platform = Literal["cuda", "rocm", "cpu"]

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"

Problem = tuple[str, str]
"""What is wrong, and the way out."""


def platform_here(root: Path = Path("/")) -> Platform:
    """The platform that this machine and the installed torch have in common, found without importing torch."""
    build = _torch_build()
    if build != "cpu" and build != "rocm" and (root / "proc/driver/nvidia/version").exists():
        return "cuda"
    if build == "rocm" and (root / "dev/kfd").exists():
        return "rocm"
    return "cpu"


def _torch_build() -> str:
    """ "cpu", "rocm" or "cuda", by the local part of torch's version (2.13.0+cpu); plain versions are CUDA builds."""
    try:
        local = metadata.version("torch").partition("+")[2]
    except metadata.PackageNotFoundError:
        return "cpu"
    return "cpu" if local.startswith("cpu") else "rocm" if local.startswith("rocm") else "cuda"


def entries(value: str) -> list[str]:
    """The devices that one variable names, in order: numbers from 0, or identifiers."""
    return [entry.strip() for entry in value.split(",") if entry.strip()]


def visible_devices(environment: Mapping[str, str], platform: Platform) -> list[str] | None:
    """The devices that a process sees, as the driver counts them; None: all of them.

    Raises ValueError with the first of ``visibility_problems``.
    """
    problems = visibility_problems(environment, platform)
    if problems:
        raise ValueError(f"{problems[0][0]}; {problems[0][1]}")
    if platform == "cpu":
        return []
    if platform == "cuda":
        value = environment.get(CUDA)
        return None if value is None else entries(value)
    first, second = environment.get(ROCR), environment.get(HIP, environment.get(CUDA))
    if first is None or second is None:
        value = first if second is None else second
        return None if value is None else entries(value)
    there = entries(first)
    return [there[int(entry)] if entry.isdigit() else entry for entry in entries(second)]


def visibility_problems(environment: Mapping[str, str], platform: Platform) -> list[Problem]:
    """What contradicts itself in the three variables; empty where they agree or nothing can read them."""
    if platform == "cpu":
        return []
    if platform == "cuda":
        others = [name for name in (HIP, ROCR) if name in environment and CUDA in environment]
        cuda = environment.get(CUDA)
        return [
            (f"{name}={environment[name]} and {CUDA}={cuda} disagree, and this is CUDA", f"unset {name}")
            for name in others
            if entries(environment[name]) != entries(cuda or "")
        ]
    return [*_hip_and_cuda(environment), *_hip_within_rocr(environment)]


def _hip_and_cuda(environment: Mapping[str, str]) -> list[Problem]:
    hip, cuda = environment.get(HIP), environment.get(CUDA)
    if hip is None or cuda is None or entries(hip) == entries(cuda):
        return []
    return [(f"{HIP}={hip} and {CUDA}={cuda} mean the same to HIP and disagree", f"unset {CUDA}")]


def _hip_within_rocr(environment: Mapping[str, str]) -> list[Problem]:
    """HIP counts among the devices that ROCR has left: its numbers begin at 0 there."""
    rocr = environment.get(ROCR)
    name = HIP if HIP in environment else CUDA
    value = environment.get(name)
    if rocr is None or value is None:
        return []
    left = entries(rocr)
    beyond = [entry for entry in entries(value) if re.fullmatch(r"\d+", entry) and int(entry) >= len(left)]
    if not beyond:
        return []
    within = ",".join(str(index) for index in range(len(left)))
    return [
        (
            f"{name}={value} counts among the {len(left)} device(s) that {ROCR}={rocr} leaves: there is no {beyond[0]}",
            f"set {name}={within} or unset one of the two",
        )
    ]
