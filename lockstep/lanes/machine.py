"""Which accelerator is here, without torch: the driver's tool, else the kernel's files; one variable may override.

``LOCKSTEP_LANES_HARDWARE`` names a model of the catalogue, or ``cpu``. It may name what the tools can't name, and may
ask for less than is there. What contradicts the devices is refused: a lane never runs on another card than it says. A
name that was read and is in no entry of the catalogue is such a contradiction; the catalogue is where it belongs.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.lanes.catalogue import Catalogue
from lockstep.lanes.declare import CPU
from lockstep.lanes.errors import LanesError

VARIABLE = "LOCKSTEP_LANES_HARDWARE"
VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
"""Variables that hide devices from a process; the tools do not heed them."""

NAMELESS = "device without a name"

Run = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True, slots=True)
class Machine:
    """``devices``: names as printed, one for each usable GPU. ``hardware``: the catalogue's name, None if it has none.

    ``source``: the tool, file or variable that said so.
    """

    vendor: str
    devices: tuple[str, ...]
    hardware: str | None
    source: str


def run_tool(command: Sequence[str]) -> str | None:
    """Standard output of a driver's tool; None if it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def detect(
    catalogue: Catalogue, environment: Mapping[str, str] | None = None, root: Path = Path("/"), run: Run = run_tool
) -> Machine:
    """This machine. Raises ``LanesError`` if the variable contradicts it or cards of two vendors are here."""
    environment = os.environ if environment is None else environment
    found = [machine for machine in (_nvidia(root, run), _amd(root, run)) if machine.devices]
    if len(found) > 1:
        sides = "; ".join(f"{machine.source}: {', '.join(machine.devices)}" for machine in found)
        raise LanesError(f"cards of two vendors are here ({sides}); hide one vendor's devices from this machine")
    seen = found[0] if found else Machine(CPU, (), CPU, "no NVIDIA or AMD device was found")
    seen = _only_visible(seen, environment)
    names = {_model(name, catalogue) for name in seen.devices}
    if seen.devices:
        seen = Machine(seen.vendor, seen.devices, names.pop() if len(names) == 1 else None, seen.source)
    wanted = environment.get(VARIABLE)
    return seen if wanted is None else _overridden(seen, wanted, catalogue)


def _overridden(seen: Machine, wanted: str, catalogue: Catalogue) -> Machine:
    if wanted != CPU and wanted not in catalogue.hardware:
        known = ", ".join([CPU, *catalogue.hardware])
        raise LanesError(f"{VARIABLE}={wanted} is not in the catalogue; known: {known}")
    if wanted == CPU:
        return Machine(CPU, (), CPU, f"{VARIABLE} ({seen.source})")
    vendor = catalogue.vendor(wanted)
    devices = ", ".join(sorted(set(seen.devices))) or "no GPU"
    if vendor != seen.vendor or (seen.hardware is not None and seen.hardware != wanted):
        raise LanesError(
            f"{VARIABLE}={wanted} says {vendor}, but the device is {devices} ({seen.source}); unset the variable, or "
            "start on the machine that it names"
        )
    family = catalogue.hardware[wanted].family
    named = [one for one in seen.devices if not _may_be(one, wanted, family, catalogue)]
    if named:
        raise LanesError(
            f"{VARIABLE}={wanted} is of family {family}, but a device is {named[0]} ({seen.source}), which "
            f"device_names of {wanted} does not match; start on the machine that it names, or mend the catalogue"
        )
    return Machine(vendor, seen.devices, wanted, f"{VARIABLE} ({seen.source}: {devices})")


def _may_be(device: str, hardware: str, family: str, catalogue: Catalogue) -> bool:
    """Whether a device is this hardware by its name, or has none and contradicts it in nothing that is known."""
    if device.endswith(NAMELESS):
        return True
    if re.fullmatch(r"gfx[0-9a-f]+", device):
        return device == family or not family.startswith("gfx")
    return _model(device, catalogue) == hardware


def _only_visible(machine: Machine, environment: Mapping[str, str]) -> Machine:
    """The devices that the environment leaves visible. Which ones is not told apart: lanes have equal cards."""
    num_visible = len(machine.devices)
    for variable in VISIBLE.get(machine.vendor, ()):
        if variable in environment:
            listed = [part for part in environment[variable].split(",") if part.strip() and part.strip() != "-1"]
            num_visible = min(num_visible, len(listed))
    if machine.devices and not num_visible:
        return Machine(CPU, (), CPU, f"{machine.source}; the environment hides every device")
    return Machine(machine.vendor, machine.devices[:num_visible], machine.hardware, machine.source)


def _model(device_name: str, catalogue: Catalogue) -> str | None:
    """The catalogue's name of a device, by patterns of the whole name."""
    for hardware, entry in catalogue.hardware.items():
        if any(fnmatch.fnmatchcase(device_name, pattern) for pattern in entry.device_names):
            return hardware
    return None


def _nvidia(root: Path, run: Run) -> Machine:
    output = run(("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"))
    if output is not None:
        return Machine("cuda", tuple(line.strip() for line in output.splitlines() if line.strip()), None, "nvidia-smi")
    names: list[str] = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        names.append(model.group(1).strip() if model else f"NVIDIA {NAMELESS}")
    return Machine("cuda", tuple(names), None, "/proc/driver/nvidia")


def _amd(root: Path, run: Run) -> Machine:
    output = run(("rocm-smi", "--showproductname", "--json"))
    names = _rocm_smi_names(output) if output else []
    if names:
        return Machine("rocm", tuple(names), None, "rocm-smi")
    for path in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        properties = dict(
            line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if " " in line.strip()
        )
        if int(properties.get("simd_count", "0")):
            names.append(_gfx_name(int(properties.get("gfx_target_version", "0"))))
    return Machine("rocm", tuple(names), None, "/sys/class/kfd")


def _rocm_smi_names(output: str) -> list[str]:
    """Names from ``rocm-smi --showproductname --json``: by card, under a key that has changed over time."""
    try:
        cards = json.loads(output)
    except json.JSONDecodeError:
        return []
    names: list[str] = []
    for card in sorted(name for name in cards if name.startswith("card")):
        values = {key.lower(): str(value) for key, value in cards[card].items()}
        candidates = [values[key] for key in ("card series", "card model", "market_name") if key in values]
        named = [name for name in candidates if "Instinct" in name or "Radeon" in name]
        names.append((named or candidates or [f"AMD {NAMELESS}"])[0])
    return names


def _gfx_name(version: int) -> str:
    """``gfx942`` of 90402: decimal major, minor and stepping, the latter two in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
