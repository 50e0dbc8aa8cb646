"""The environment of a launch: judged before anything starts, applied to this process, handed to the engine's, filed.

Used before torch is imported, since some variables are read when a library is loaded (OMP_NUM_THREADS) or at its first
use: nothing here imports it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.environment_checks import expandable_segments
from lockstep.config.errors import ConfigError, Violation
from lockstep.config.schema import RunConfig
from lockstep.environment.ledger import Ledger, judge, with_reads
from lockstep.environment.processes import applied, child_environment, resolve_secrets, shell_environment
from lockstep.environment.readers import Package, installed_package
from lockstep.environment.recorded import Reads, recorded_reads
from lockstep.environment.secrets import mask_arguments, masked_records, secret_values
from lockstep.hardware.visibility import Platform, platform_here, visibility_problems
from lockstep.topology.catalogue import hardware

logger = logging.getLogger(__name__)

PLATFORMS: Mapping[str, Platform] = {"nvidia": "cuda", "amd": "rocm", "cpu": "cpu"}

ENGINE_PACKAGES = frozenset({"vllm", "sglang", "aiter"})
"""Readers that live in the engine's environment if that is another one."""


@dataclass(slots=True)
class Launch:
    """A launch in force. ``engine_reads`` is what the engine's own process has looked up (None: it has none, or it was
    not asked yet)."""

    config: RunConfig
    ledger: Ledger
    reads: Reads
    engine_reads: Mapping[str, list[str]] | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """For ``environment.json``: the ledger with the reads so far. Holds no secret."""
        here = self.reads.as_dict()
        seen: dict[str, Mapping[str, list[str]]] = {"trainer": here}
        if self.config.rollout.process == "inline":
            seen["engine"] = here
        elif self.engine_reads is not None:
            seen["engine"] = self.engine_reads
        return with_reads(self.ledger, seen).as_dict()


_current: list[Launch] = []


@contextmanager
def launched(config: RunConfig) -> Iterator[Launch]:
    """This process with the trainer's variables in force, recording what is read. Inside another launch of the same
    configuration: that one. Raises ConfigError where the ledger has errors or two settings exclude each other;
    warnings go to the log, once."""
    if _current and _current[-1].config == config:
        yield _current[-1]
        return
    shell = shell_environment()
    ledger = examine(config, shell)
    secrets = secret_values(shell, *declared(config).values())
    with applied(own_variables(config)), recorded_reads() as reads, masked_records(secrets):
        for finding in ledger.findings:
            if finding.severity == "warning":
                logger.warning("%s", finding.text())
        launch = Launch(config, ledger, reads, secrets=secrets)
        _current.append(launch)
        try:
            yield launch
        finally:
            _current.remove(launch)


def current_launch() -> Launch | None:
    """The launch in force, if there is one."""
    return _current[-1] if _current else None


def examine(
    config: RunConfig, shell: Mapping[str, str], *, refuse: bool = True, platform: Platform | None = None
) -> Ledger:
    """The ledger of a configuration and a shell on ``platform`` (None: the run's). Raises ConfigError with every error
    and exclusion at once, unless ``refuse`` is false."""
    platform = platform or platform_of(config)
    ledger = judge(
        declared(config),
        shell,
        packages=_finder(config),
        strict=config.environment.strict,
        platform=platform,
    )
    if not refuse:
        return ledger
    violations = [
        Violation(
            f"environment.{finding.process}.{finding.name}",
            finding.message,
            finding.repair or "correct it, or set environment.strict = false",
        )
        for finding in ledger.errors
    ]
    violations += _excluded(config, shell)
    devices = {**shell, **resolve_secrets(own_variables(config), shell)}
    violations += [Violation("", wrong, way_out) for wrong, way_out in visibility_problems(devices, platform)]
    if violations:
        raise ConfigError("environment", violations)
    return ledger


def platform_of(config: RunConfig) -> Platform:
    """The platform that the run is for: that of the hardware that it names, else of this machine."""
    if config.cluster.hardware is not None:
        return PLATFORMS[hardware(config.cluster.hardware).vendor]
    return "cpu" if config.device == "cpu" else platform_here()


def declared(config: RunConfig) -> dict[str, dict[str, str]]:
    """What the configuration sets, by process."""
    return {"trainer": config.environment.trainer, "engine": config.environment.engine}


def own_variables(config: RunConfig) -> dict[str, str]:
    """What is set in this process: the trainer's, and the engine's where the engine is here."""
    section = config.environment
    return section.trainer | section.engine if config.rollout.process == "inline" else section.trainer


def engine_environment(config: RunConfig) -> dict[str, str]:
    """The environment of an engine's own process: nothing that is declared for the trainer reaches it."""
    return child_environment(shell_environment(), config.environment.engine)


def shown_command(launch: Launch | None) -> list[str]:
    """This process' command line without secrets."""
    return mask_arguments(sys.argv, launch.secrets if launch else ())


def _excluded(config: RunConfig, shell: Mapping[str, str]) -> list[Violation]:
    """Expandable segments that the shell asks for, where CUDA IPC is to share memory."""
    if config.refit.transport != "cuda_ipc":
        return []
    name = expandable_segments({**shell, **config.environment.trainer})
    if name is None or name in config.environment.trainer:  # a declared one is refused when the configuration loads
        return []
    message = f"{name}={shell[name]} comes from the shell: expandable segments can't be shared by CUDA IPC"
    way_out = f'unset {name}, or set refit.transport = "shm"'
    return [Violation("refit.transport", message, way_out)]


def engine_package(config: RunConfig, name: str) -> Package | None:
    """A package of the rollout engine, where the engine will run."""
    return _finder(config)(name)


def _finder(config: RunConfig) -> Callable[[str], Package | None]:
    """Where a reader is: the engine's packages in the engine's environment, if it has one of its own."""
    python = config.rollout.python
    if config.rollout.process == "inline" or python is None:
        return installed_package
    search = [str(folder) for folder in Path(python).parent.parent.glob("lib/python3*/site-packages")]

    def find(name: str) -> Package | None:
        return installed_package(name, search) if name in ENGINE_PACKAGES else installed_package(name)

    return find
