"""What a memory plan means: which phase does not fit, which offload would make it fit, and how two plans differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lockstep.topology.memory_records import MemoryItem, MemoryPlan, PhasePlan, StageMemory, gigabytes
from lockstep.topology.records import Finding, Job
from lockstep.topology.trainer_memory import optimizer_bytes, phase_items

_SOURCE = "lockstep/topology/memory.py: plan_memory"
_STEP = 0.05
"""Offload fractions are proposed in steps of this."""


def fit_findings(job: Job, plan: MemoryPlan) -> Iterator[Finding]:
    """ "memory-fits": an error for each kind of device whose worst phase exceeds it, a warning within the margin.

    Generation is judged apart from the trainer's phases, because another offload helps it.
    """
    capacity = plan.capacity_bytes
    if capacity is None:
        return
    groups: dict[tuple[str, bool], list[PhasePlan]] = {}
    for phase in plan.phases:
        groups.setdefault((phase.devices, phase.phase == "generate"), []).append(phase)
    for phases in groups.values():
        worst = max(phases, key=lambda phase: phase.total_bytes)
        over = [phase.phase for phase in phases if phase.total_bytes > capacity and phase is not worst]
        largest = sorted(worst.items, key=lambda item: -item.num_bytes)[:4]
        parts = ", ".join(f"{item.owner} {item.name} {gigabytes(item.num_bytes)}" for item in largest)
        stage = "" if worst.stage is None else f", stage {worst.stage}"
        total = f"{gigabytes(worst.total_bytes)} of {gigabytes(capacity)}"
        also = f"; {', '.join(over)} too" if over else ""
        message = f"{worst.phase}{stage} on {job.hardware.name}: {total} ({parts}){also}"
        if worst.total_bytes > capacity:
            message += _states_alone(plan, worst, capacity)
            text, changes = _repair(job, plan, worst, worst.total_bytes - capacity)
            bounds = "" if any(phase.least_bytes > capacity for phase in phases) else _upper_bounds(worst)
            yield Finding("memory-fits", "warning" if bounds else "error", f"{message}{bounds}", text, _SOURCE, changes)
        elif worst.total_bytes * (1 + plan.margin) > capacity:
            yield Finding("memory-fits", "warning", f"{message}: within the margin of {plan.margin:.0%}", "", _SOURCE)


def _states_alone(plan: MemoryPlan, phase: PhasePlan, capacity: int) -> str:
    """That a stage exceeds the device before anything is computed, if its optimizer's states lie there and do that."""
    held = plan.stages[phase.stage or 0] if plan.stages else None
    if held is None or phase.item("optimizer states") is None or held.total <= capacity:
        return ""
    alone = gigabytes(held.total)
    return f"; the device can't hold the optimizer states: with weights and gradients they alone are {alone}"


def _upper_bounds(phase: PhasePlan) -> str:
    """Which items leave open whether the phase fits, and how far."""
    loose = sorted((item for item in phase.items if item.slack), key=lambda item: -item.slack)
    names = ", ".join(f"{item.owner} {item.name} ({gigabytes(item.slack)} less at best)" for item in loose)
    return f"; it may not fit: the number is an upper bound by {names}, and at least {gigabytes(phase.least_bytes)}"


def _repair(job: Job, plan: MemoryPlan, phase: PhasePlan, over: int) -> tuple[str, tuple[tuple[str, object], ...]]:
    """The offload that this phase must use to fit, and the setting for it."""
    own = job.train is None or job.train.backend == "fsdp"
    if phase.phase == "generate":
        resident = sum(item.num_bytes for item in phase.items if item.owner == "trainer" and item.name in _OFFLOADED)
        if own or job.memory.offload_weights or resident < over:
            return "a smaller memory_fraction, fewer running requests, or more ranks an engine", ()
        return "offload_weights off → on: the trainer must leave the device", (("memory.offload_weights", True),)
    if phase.devices == "engine" or own:
        return "more devices, a smaller micro-batch, or recomputation", ()
    share = _offload_fraction(job, plan.stages[phase.stage or 0], over)
    if share is None and _recomputation_saves(job, plan, phase) >= over:
        was = job.memory.recompute
        text = f"recompute {was} → full, uniform, one layer at a time: no offload of optimizer states is enough"
        return text, tuple((f"memory.{name}", value) for name, value in _RECOMPUTED.items())
    if share is None:
        return "more pipeline or expert-parallel ranks: no offload of optimizer states is enough", ()
    was = job.memory.optimizer_offload_fraction
    text = f"optimizer_offload_fraction {was:g} → {share:g}: states in host memory, with the precision-aware optimizer"
    changes = (("memory.optimizer_offload_fraction", share), ("memory.precision_aware_optimizer", True))
    return text, changes


_OFFLOADED = {"weights", "gradients", "optimizer states", "fp8 copies of weights"}


_RECOMPUTED: dict[str, Any] = {"recompute": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _recomputation_saves(job: Job, plan: MemoryPlan, phase: PhasePlan) -> int:
    """Bytes that recomputing every layer would take off the activations of a training phase; 0 for another phase."""
    now = phase.item("activations")
    if phase.phase != "train" or now is None:
        return 0
    again = replace(job, memory=replace(job.memory, **_RECOMPUTED))
    items = phase_items(again, plan.stages[phase.stage or 0], len(plan.stages), "train")
    return now.num_bytes - next(item.num_bytes for item in items if item.name == "activations")


def _offload_fraction(job: Job, held: StageMemory, over: int) -> float | None:
    """The smallest fraction, in steps, that frees ``over`` more bytes; None if all of the states are not enough."""
    was = job.memory.optimizer_offload_fraction
    if was >= 1 or held.optimizer <= 0:
        return None
    # The device keeps 12 bytes a parameter of what is not offloaded, whatever it kept before.
    bits = job.memory
    whole = held.optimizer / (1 - was)
    if not was and bits.precision_aware_optimizer:
        whole = held.optimizer * 12 / optimizer_bytes(bits)
    left = held.optimizer - over
    if left < 0:
        return None
    share = math.ceil((1 - left / whole) / _STEP - 1e-9) * _STEP
    return round(min(1.0, share), 2)


def compare_plans(a: MemoryPlan, b: MemoryPlan) -> str:
    """The items in which two plans differ, phase by phase, largest difference first; with each phase's totals.

    Reads as "what b costs more or less than a, and where it goes".
    """
    lines = [f"{a.job} → {b.job}"]
    for plan in a.phases:
        other = next((p for p in b.phases if (p.phase, p.devices) == (plan.phase, plan.devices)), None)
        if other is None:
            lines.append(f"{plan.phase}: only in {a.job}")
            continue
        totals = f"{gigabytes(plan.total_bytes)} → {gigabytes(other.total_bytes)}"
        lines.append(f"{plan.phase} ({plan.devices}): {totals}")
        lines += [f"    {line}" for line in _differences(plan, other)]
    if a.host_bytes != b.host_bytes:
        lines.append(f"host, per node: {gigabytes(a.host_bytes)} → {gigabytes(b.host_bytes)}")
    if a.kv_tokens != b.kv_tokens:
        lines.append(f"tokens in a cache: {a.kv_tokens} → {b.kv_tokens}")
    return "\n".join(lines)


def _differences(a: PhasePlan, b: PhasePlan) -> list[str]:
    """One line an item, by falling size of the difference."""
    mine, theirs = _by_name(a), _by_name(b)
    rows = []
    for key in {**mine, **theirs}:
        was, now = (side[key].num_bytes if key in side else 0 for side in (mine, theirs))
        if was != now:
            note = (theirs.get(key) or mine[key]).note
            rows.append((now - was, f"{key[0]} {key[1]}: {gigabytes(was)} → {gigabytes(now)} ({note})"))
    return [text for _, text in sorted(rows, key=lambda row: -abs(row[0]))]


def _by_name(plan: PhasePlan) -> dict[tuple[str, str], MemoryItem]:
    return {(item.owner, item.name): item for item in plan.items}


def plan_text(plan: MemoryPlan) -> str:
    """The plan for a terminal: phases with their items, host memory, margin and what is left out."""
    capacity = "unknown" if plan.capacity_bytes is None else gigabytes(plan.capacity_bytes)
    lines = [f"memory of {plan.job}, one device of {capacity}"]
    for phase in plan.phases:
        stage = "" if phase.stage is None else f", stage {phase.stage}"
        lines.append(f"  {phase.phase} ({phase.devices}{stage}): {gigabytes(phase.total_bytes)}")
        lines += [_line(item) for item in phase.items if item.num_bytes]
    if plan.host:
        lines.append(f"  host, per node: {gigabytes(plan.host_bytes)}")
        lines += [_line(item) for item in plan.host]
    if plan.kv_tokens is not None:
        lines.append(f"  {_cache_line(plan.kv_tokens, plan.kv_tokens_least)}")
    lines.append(f"  margin {plan.margin:.0%}; not modelled: {'; '.join(plan.not_modelled)}")
    return "\n".join(lines)


def _cache_line(tokens: int, least: int | None) -> str:
    text = f"the cache of one engine rank holds {tokens:,} tokens"
    return text if least in (None, tokens) else f"{text}, {least:,} if weights and cache are off by the margin"


def _line(item: MemoryItem) -> str:
    source = f" [{item.source}]" if item.source else ""
    return f"    {gigabytes(item.num_bytes):>9}  {item.owner} {item.name}: {item.basis}; {item.note}{source}"
