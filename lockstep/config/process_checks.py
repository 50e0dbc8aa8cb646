"""Rules of where the rollout engine runs and how weights get there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from lockstep.config.algorithm_checks import inert, rule
from lockstep.config.errors import Violation
from lockstep.config.schema import RunConfig

WITHIN_A_PROCESS = ("local", "shared")
ACROSS_PROCESSES = ("shm", "cuda_ipc")
IN_BUCKETS = ("shm", "disk", "cuda_ipc")


def chosen_transport(config: RunConfig) -> Literal["local", "shared", "shm", "disk", "cuda_ipc"]:
    """The transport in force: ``auto`` is a copy within the process, or shared memory between two."""
    if config.refit.transport != "auto":
        return config.refit.transport
    return "shm" if config.rollout.process == "separate" else "local"


@rule
def transport_reaches_the_engine(config: RunConfig) -> Iterator[Violation]:
    """A copy or an alias stays within a process; shared memory and handles of GPU memory lead into another."""
    transport, process = config.refit.transport, config.rollout.process
    if process == "separate" and transport in WITHIN_A_PROCESS:
        message = f"{transport} stays within the trainer's process, the engine has its own"
        way_out = 'set refit.transport = "shm", or rollout.process = "inline"'
        yield Violation("refit.transport", message, way_out, ("rollout.process",))
    if process == "inline" and transport in ACROSS_PROCESSES:
        message = f"{transport} leads into another process, the engine is in the trainer's"
        way_out = 'set refit.transport = "local", or rollout.process = "separate"'
        yield Violation("refit.transport", message, way_out, ("rollout.process",))


@rule
def disk_has_its_folder(config: RunConfig) -> Iterator[Violation]:
    """Only the disk transport writes files, and it must be told where both sides see them."""
    if config.refit.transport != "disk":
        yield from inert(config.refit, "refit", "folder", "without transport disk", ("refit.transport",))
    elif config.refit.folder is None:
        message = "disk needs a folder that trainer and engine both see"
        yield Violation("refit.folder", message, "name one: refit.folder", ("refit.transport",))


@rule
def buckets_have_a_transport(config: RunConfig) -> Iterator[Violation]:
    """The transports within a process take each tensor by itself and wait for nobody."""
    if chosen_transport(config) not in IN_BUCKETS:
        because = f"with transport {chosen_transport(config)}"
        yield from inert(config.refit, "refit", "bucket_bytes timeout_s", because, ("refit.transport",))


@rule
def an_interpreter_has_a_process(config: RunConfig) -> Iterator[Violation]:
    """An engine in the trainer's process runs under its interpreter."""
    if config.rollout.process == "inline":
        because = "with an engine in the trainer's process"
        yield from inert(config.rollout, "rollout", "python", because, ("rollout.process",))
