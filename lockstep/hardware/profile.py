"""The machine as one record, and the settings that follow from it, each with its reason."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.schema import RunConfig
from lockstep.hardware.cpu import Cpu, detect_cpu
from lockstep.hardware.cuda import Cuda, Gpu, detect_cuda
from lockstep.hardware.rocm import NO_ROCM, Rocm, detect_rocm

DISTRIBUTION = "lockstep-rl"
REPORTED_VERSIONS = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "pydantic")


@dataclass(frozen=True, slots=True)
class Profile:
    """What is here. ``versions`` by distribution (None: not installed); ``disk_free_bytes`` of the working folder."""

    cpu: Cpu
    cuda: Cuda
    python: str
    system: str
    versions: dict[str, str | None] = field(default_factory=dict)
    disk_free_bytes: int = 0
    rocm: Rocm = NO_ROCM

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Visible GPUs of either vendor: torch is built for one of them, and calls both ``cuda``."""
        return self.cuda.gpus or self.rocm.gpus

    @property
    def vendor(self) -> Literal["nvidia", "amd", "cpu"]:
        """Whose the best device is."""
        return "nvidia" if self.cuda.gpus else "amd" if self.rocm.gpus else "cpu"

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """The best device that is usable, by torch's name."""
        return "cuda" if self.gpus else "cpu"

    @property
    def device_name(self) -> str:
        """Name of the best device."""
        return self.gpus[0].name if self.gpus else self.cpu.name

    @property
    def why_no_gpu(self) -> str:
        """In words, why torch can use no GPU."""
        return self.rocm.reason if self.rocm.physical or self.rocm.runtime else self.cuda.reason


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting that depends on the hardware, the value chosen and why. ``slow`` marks a choice that works badly."""

    setting: str
    value: str | int
    reason: str
    slow: bool = False


def detect(folder: Path = Path()) -> Profile:
    """Look at this machine; ``folder`` is where runs will be written."""
    return Profile(
        cpu=detect_cpu(),
        cuda=detect_cuda(),
        rocm=detect_rocm(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={name: _version(name) for name in REPORTED_VERSIONS},
        disk_free_bytes=shutil.disk_usage(folder).free,
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed(names: Sequence[str]) -> str | None:
    """Name and version of the first of these distributions that is installed; None if none is."""
    return next((f"{name} {version}" for name in names if (version := _version(name))), None)


def choose(
    profile: Profile, config: RunConfig | None = None, environment: Mapping[str, str] | None = None
) -> tuple[Choice, ...]:
    """Device, threads and what to expect of the dtypes, for a configuration (None: all defaults).

    Raises ``ConfigError`` when the configuration asks for a device that is not here.
    """
    environment = os.environ if environment is None else environment
    device = _choose_device(profile, config)
    threads = _choose_threads(profile, config.threads if config else None, environment)
    dtypes = (
        {"trainer.dtype": config.trainer.dtype, "rollout.dtype": config.rollout.dtype}
        if config
        else {"trainer.dtype": "bfloat16", "rollout.dtype": "bfloat16"}
    )
    return (device, threads, *(_judge_dtype(profile, device, key, dtype) for key, dtype in dtypes.items()))


def _choose_device(profile: Profile, config: RunConfig | None) -> Choice:
    wanted = config.device if config else "auto"
    if wanted == "cuda" and not profile.gpus:
        problem = Violation("device", f"no CUDA device: {profile.why_no_gpu}", 'set device = "cpu" or "auto"')
        raise ConfigError("hardware", [problem])
    if wanted != "auto":
        return Choice("device", wanted, "as configured")
    if config and config.cluster.hardware == "cpu":
        return Choice("device", "cpu", "cluster.hardware is cpu")
    if profile.gpus:
        return Choice("device", "cuda", f"{profile.device_name} is usable")
    return Choice("device", "cpu", profile.why_no_gpu)


def _choose_threads(profile: Profile, wanted: int | None, environment: Mapping[str, str]) -> Choice:
    cores = profile.cpu.num_cores
    if wanted is not None:
        slow = wanted > cores
        note = f", more than the {cores} cores that this process may use: they will wait for each other" if slow else ""
        return Choice("threads", wanted, f"as configured{note}", slow)
    given = environment.get("OMP_NUM_THREADS", "")
    if given.isdigit() and 0 < int(given) < cores:
        return Choice("threads", int(given), f"OMP_NUM_THREADS={given} (of {cores} cores)")
    return Choice("threads", cores, profile.cpu.cores_reason)


def _judge_dtype(profile: Profile, device: Choice, key: str, dtype: str) -> Choice:
    if dtype != "bfloat16":
        return Choice(key, dtype, "as configured")
    if device.value == "cuda":
        bf16 = profile.gpus[0].bf16
        reason = "tensor cores multiply it" if bf16 else "this GPU only emulates it: it will be slow; use float32"
        return Choice(key, dtype, reason, slow=not bf16)
    flag = profile.cpu.bf16_flag
    if flag:
        return Choice(key, dtype, f"{flag} present")
    return Choice(key, dtype, "this CPU has no bfloat16 instructions: it will be slow; use float32", slow=True)


def missing_dependencies() -> list[tuple[str, str]]:
    """Required distributions that are absent or too old: (what is wrong, way out)."""
    from packaging.requirements import Requirement

    problems: list[tuple[str, str]] = []
    try:
        requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return [(f"{DISTRIBUTION} is not installed, only imported", "pip install -e . in the repository")]
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if installed is None:
            problems.append((f"{requirement.name} is missing", f'pip install "{wanted}"'))
        elif not requirement.specifier.contains(installed, prereleases=True):
            problems.append((f"{requirement.name} {installed} does not satisfy {wanted}", f'pip install "{wanted}"'))
    return problems
