"""What the planner hands out: items of memory, each with its basis, by phase of the loop and by device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.topology.records import Finding

Basis = Literal["counted", "measured", "assumed"]
Phase = Literal["generate", "score", "train", "refit", "save"]
Owner = Literal["trainer", "engine"]

PHASES: tuple[Phase, ...] = ("generate", "score", "train", "refit", "save")


MARGIN = 0.08
"""Share of a plan by which a peak may exceed it: fragmentation, padding of buckets, uneven routing, graphs."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Bytes on one device (or of one host) with their reason. ``basis``: *counted* from sizes that the job states;
    *measured* on a device once and taken over; *assumed*, because the job does not say or nobody measured it.
    ``note`` is the formula with its numbers, ``source`` where it is from. ``slack``: how much less it may be, where
    ``num_bytes`` is an upper bound."""

    name: str
    num_bytes: int
    basis: Basis
    note: str = ""
    source: str = ""
    owner: Owner = "trainer"
    slack: int = 0


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """One phase on one kind of device: ``devices`` "shared" (trainer and engine), "trainer" or "engine"; ``stage`` is
    the pipeline rank that needs most (None: there is no pipeline)."""

    phase: Phase
    devices: Literal["shared", "trainer", "engine"]
    stage: int | None
    items: tuple[MemoryItem, ...]

    @property
    def total_bytes(self) -> int:
        """Peak of the phase."""
        return sum(item.num_bytes for item in self.items)

    @property
    def least_bytes(self) -> int:
        """Peak of the phase if every upper bound is as far off as it may be."""
        return sum(item.num_bytes - item.slack for item in self.items)

    def item(self, name: str, owner: Owner = "trainer") -> MemoryItem | None:
        """The item of that name, if there is one."""
        return next((item for item in self.items if item.name == name and item.owner == owner), None)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What lies on one device of a pipeline stage whatever it does: bytes of weights, gradients, optimizer states, and
    the states in host memory instead."""

    stage: int
    layers: tuple[int, ...]
    weights: int
    gradients: int
    optimizer: int
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a whole job. ``phases`` in the order of the loop, each the worst pipeline stage; ``host`` per node;
    ``kv_tokens`` the tokens that one engine rank's cache holds (None: no engine, or no limit), ``kv_tokens_least`` if
    weights and cache together are off by the margin. ``margin`` is the share of the plan by which a real peak may
    exceed it before the findings call the layout safe."""

    job: str
    capacity_bytes: int | None
    phases: tuple[PhasePlan, ...]
    stages: tuple[StageMemory, ...]
    host: tuple[MemoryItem, ...]
    kv_tokens: int | None
    margin: float
    not_modelled: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    kv_tokens_least: int | None = None

    @property
    def peak(self) -> PhasePlan | None:
        """The phase that needs most; None if nothing could be planned."""
        return max(self.phases, key=lambda phase: phase.total_bytes, default=None)

    def phase(self, name: Phase) -> PhasePlan:
        """The plan of one phase. Raises KeyError if the job doesn't have it."""
        for plan in self.phases:
            if plan.phase == name:
                return plan
        raise KeyError(name)

    @property
    def host_bytes(self) -> int:
        """Host memory per node."""
        return sum(item.num_bytes for item in self.host)


def gigabytes(num_bytes: float) -> str:
    """ "84.8 GB" (1e9 bytes), megabytes below one."""
    if abs(num_bytes) < 0.95e9:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e9:.1f} GB"
