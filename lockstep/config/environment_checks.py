"""Rules of the variables that a run sets."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.config.algorithm_checks import rule
from lockstep.config.errors import Violation
from lockstep.config.schema import RunConfig
from lockstep.config.secrets import masked

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def expandable_segments(variables: dict[str, str]) -> str | None:
    """The variable by which PyTorch's allocator is told to use expandable segments; None if none is."""
    for name in ALLOCATOR_VARIABLES:
        for option in variables.get(name, "").split(","):
            key, _, value = option.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() == "true":
                return name
    return None


@rule
def one_process_has_one_value(config: RunConfig) -> Iterator[Violation]:
    """An engine in the trainer's process has its environment: one variable can't have two values there."""
    if config.rollout.process == "separate":
        return
    trainer, engine = config.environment.trainer, config.environment.engine
    for name in sorted(trainer.keys() & engine.keys()):
        if trainer[name] != engine[name]:
            yield Violation(
                f"environment.engine.{name}",
                f"is {masked(name, engine[name])!r} for the engine and {masked(name, trainer[name])!r} for the "
                "trainer, which are one process",
                'give it one value, or set rollout.process = "separate"',
                (f"environment.trainer.{name}", "rollout.process"),
            )


@rule
def shared_memory_is_not_expandable(config: RunConfig) -> Iterator[Violation]:
    """CUDA IPC hands out the address of one allocation; a segment that grows has several, and its handle is refused
    (ROCm/aiter#4174: "invalid argument" in the first all-reduce)."""
    if config.refit.transport != "cuda_ipc":
        return
    for process in ("trainer", "engine"):
        name = expandable_segments(getattr(config.environment, process))
        if name is not None:
            yield Violation(
                f"environment.{process}.{name}",
                "expandable segments can't be shared by CUDA IPC",
                'remove expandable_segments:True, or set refit.transport = "shm"',
                ("refit.transport",),
            )
