"""Whether memory that was given back is free: by the device's own count, since a runtime may say so while pages stay.

On ROCm an engine's sleep once released its handles and kept the address range reserved: the runtime reported the memory
as freed and the driver had it in use (vllm-project/vllm#37533, #43022), so that the trainer beside it found none.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENOUGH = 0.9
"""Share of what was held that must be free afterwards: other processes on the device take and give in the meantime."""

Count = Callable[[], int | None]
"""Bytes in use on the device, or None where nothing counts them."""


def device_count(index: int = 0) -> Count:
    """The count of device ``index`` of this process by the driver: nvidia-smi, or amdgpu's file; None where there is
    no device. No other process's memory is left out."""
    import torch

    if not torch.cuda.is_available():
        return lambda: None
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return lambda: amd_used_bytes(properties)
    return lambda: nvidia_used_bytes(str(properties.uuid))


def nvidia_used_bytes(uuid: str) -> int | None:
    """Bytes in use on an NVIDIA device; None where nvidia-smi is missing or does not tell."""
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.strip()
    return int(text) << 20 if done.returncode == 0 and text.isdigit() else None


def amd_used_bytes(properties: Any, root: Path = Path("/")) -> int | None:
    """Bytes in use on an AMD device, from the kernel driver's file; None where it is not there."""
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, device = parts
    path = root / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/mem_info_vram_used"
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def not_freed(release: Callable[[], object], held: int, count: Count) -> str | None:
    """Run ``release``, which is to give ``held`` bytes back, and say what is wrong if the device's count does not fall
    by as much; None where it does, or where nothing counts."""
    before = count()
    release()
    after = count()
    if before is None or after is None or before - after >= ENOUGH * held:
        return None
    return (
        f"{held / 1e9:.2f} GB were to be given back, and the device's own count fell by {(before - after) / 1e9:.2f} GB"
        ": the memory is still in use"
    )
