"""The CPU side of a machine as this process may use it: cores, memory and bfloat16 support.

Affinity masks and cgroup limits (versions 1 and 2) count: in a container the machine's own figures are not ours.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")
"""Names in /proc/cpuinfo of instructions that multiply bfloat16: x86's flags, then Arm's features."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """``num_cores`` this process may use, memory in bytes, and each figure's source in words.

    ``bf16_flag`` names the instruction set that makes bfloat16 fast, None where there is none.
    """

    name: str
    num_cores: int
    cores_reason: str
    memory_total_bytes: int
    memory_available_bytes: int
    memory_reason: str
    bf16_flag: str | None


def detect_cpu(root: Path = Path("/")) -> Cpu:
    """Read the CPU under ``root`` (another folder in tests). Raises ``OSError`` where there is no Linux /proc."""
    fields = _fields((root / "proc/cpuinfo").read_text())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    cores, cores_reason = _cores(root)
    total, available, memory_reason = _memory(root)
    return Cpu(
        name=fields.get("model name", "unknown CPU"),
        num_cores=cores,
        cores_reason=cores_reason,
        memory_total_bytes=total,
        memory_available_bytes=available,
        memory_reason=memory_reason,
        bf16_flag=next((flag for flag in BF16_FLAGS if flag in flags), None),
    )


def _fields(text: str) -> dict[str, str]:
    """``name : value`` lines; the first of a name counts (all processors of a machine agree)."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _cores(root: Path) -> tuple[int, str]:
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota(root)
    if quota is not None and math.ceil(quota) < allowed:
        return max(1, math.ceil(quota)), f"cgroup quota of {quota:g} cores (affinity mask: {allowed})"
    return allowed, "cores in the affinity mask of this process"


def _cpu_quota(root: Path) -> float | None:
    """The tightest CPU quota of the cgroups this process is in, in cores; None: unlimited."""
    quotas: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        two = _read(folder / "cpu.max").split()
        if len(two) == 2 and two[0] != "max":
            quotas.append(int(two[0]) / int(two[1]))
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory(root: Path) -> tuple[int, int, str]:
    fields = _fields((root / "proc/meminfo").read_text())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    reason = "memory of the machine"
    for folder in _cgroup_folders(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        # Version 1 says "unlimited" with a number near 2^63; a limit above the machine's memory limits nothing.
        if limit.isdigit() and used.isdigit() and int(limit) < total:
            total, reason = int(limit), f"cgroup limit ({folder})"
            available = min(available, max(0, total - int(used) + _reclaimable(folder)))
    return total, available, reason


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache that the kernel gives back when asked: counted as used, but available."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup for a controller, from its own up to the mount: any of them may limit."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controllers if controllers else mount
        folder = base / path.lstrip("/")
        while folder.is_relative_to(base):
            if folder.is_dir():
                yield folder
            folder = folder.parent


def _read(path: Path) -> str:
    """The stripped text of a file, "" where it is absent: not every kernel has every file."""
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far. On Linux that of this program alone (``VmHWM``): ``ru_maxrss`` is
    inherited from whoever started it, a launcher of many gigabytes for example."""
    for line in _read(Path("/proc/self/status")).splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def return_freed_memory() -> None:
    """Give freed heap pages back to the operating system, where the C library can (glibc; elsewhere nothing happens).

    Steps of ever different shapes fragment glibc's heap. With a bounded primitive cache (``hardware/allocator.py``) and
    one call of this a step the quickstart peaks at 4.7 GB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
