"""Why two settings of a job differ, as far as bytes say it: what each leaves free, which fractions would have fitted.

``explain_settings`` plans both jobs as they are, without their offload of optimizer states, and ``after`` with the
fractions between theirs. It says in numbers what asks for a setting; where nothing that is counted does, it says that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from lockstep.topology.memory import plan_memory
from lockstep.topology.memory_records import MemoryPlan, gigabytes
from lockstep.topology.records import EngineLayout, Job
from lockstep.topology.trainer_memory import CONTEXT_BYTES

_GROUPS = ("train", "memory", "engine", "batch")


def explain_settings(before: Job, after: Job) -> str:
    """The settings that differ between two jobs, and ``explain_fractions``, for a terminal."""
    lines = [f"{before.name} → {after.name}"]
    lines += [f"  {line}" for line in _differences(before, after)] or ["  no setting differs"]
    return "\n".join([*lines, *explain_fractions(before, after)])


def explain_fractions(before: Job, after: Job) -> list[str]:
    """What two plans say about their engines' fractions and their offload.

    For each job what its fraction takes, its fullest phase and the fractions that fit, with its offload of optimizer
    states and without; ``after`` at each tenth from its own fraction to that of ``before``; and, in the lines that
    begin with "so", whether the plan asks for the other fraction.
    """
    lines = []
    for job in (before, after):
        lines.append(f"{job.name}: {_taken(job)}; {_fitting(job)}{_needed(job)}")
        lines += [f"  {line}" for line in _without_offload(job)]
    return [*lines, *_fractions_between(before, after)]


def fractions_that_fit(job: Job) -> tuple[float, float] | None:
    """The smallest and the largest memory fraction, in hundredths, with which every phase of ``job`` fits; None if none
    does or the job has no engine with a fraction."""
    if _fraction(job) is None:
        return None
    fitting = [share / 100 for share in range(1, 100) if not _misfit(_with_fraction(job, share / 100))]
    return (fitting[0], fitting[-1]) if fitting else None


def _differences(before: Job, after: Job) -> Iterator[str]:
    """ "train.tp 8 → 4", for every field of the job's groups and the settings outside them."""
    for path, was, now in _pairs(before, after):
        if was != now:
            yield f"{path} {_shown(was)} → {_shown(now)}"


def _pairs(before: Job, after: Job) -> Iterator[tuple[str, Any, Any]]:
    for one in fields(Job):
        was, now = getattr(before, one.name), getattr(after, one.name)
        if one.name in _GROUPS and None not in (was, now):
            for inner in fields(was):
                yield f"{one.name}.{inner.name}", getattr(was, inner.name), getattr(now, inner.name)
        elif one.name not in ("name", "environment"):
            yield one.name, getattr(was, "name", was), getattr(now, "name", now)
    for process in sorted({*before.environment, *after.environment}):
        ours, theirs = (dict(job.environment.get(process, {})) for job in (before, after))
        for name in sorted({*ours, *theirs}):
            yield f"environment.{process}.{name}", ours.get(name), theirs.get(name)


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _taken(job: Job) -> str:
    """What the engine's fraction is of, and how full the fullest phase is."""
    plan, share = plan_memory(job), _fraction(job)
    if share is None or plan.capacity_bytes is None or not plan.phases:
        return _fullness(plan)
    held = {item.name: item.num_bytes for item in plan.phase("generate").items if item.owner == "engine"}
    vllm = job.engine is not None and job.engine.engine == "vllm"
    of = plan.capacity_bytes if vllm else _free_before_loading(plan)
    whose = "the device" if vllm else "what is free before loading"
    return (
        f"{share:g} of {gigabytes(of)}, {whose}, is {gigabytes(of * share)}: weights {gigabytes(held['weights'])}, "
        f"cache {gigabytes(held['key/value cache'])} for {plan.kv_tokens or 0:,} tokens; {_fullness(plan)}"
    )


def _free_before_loading(plan: MemoryPlan) -> int:
    """What SGLang finds free: all but what the trainer keeps and the engine's own context."""
    held = sum(item.num_bytes for item in plan.phase("generate").items if item.owner == "trainer")
    return (plan.capacity_bytes or 0) - held - CONTEXT_BYTES


def _fullness(plan: MemoryPlan) -> str:
    worst = plan.peak
    if worst is None or plan.capacity_bytes is None:
        return "a device of unknown memory"
    spare = plan.capacity_bytes - worst.total_bytes
    left = f"{gigabytes(spare)} to spare" if spare >= 0 else f"{gigabytes(-spare)} too much"
    return f"fullest in {worst.phase}, {gigabytes(worst.total_bytes)} of {gigabytes(plan.capacity_bytes)}, {left}"


def _fitting(job: Job) -> str:
    span = fractions_that_fit(job)
    return "no fraction fits" if span is None else f"fractions from {span[0]:g} to {span[1]:g} fit"


def _needed(job: Job) -> str:
    """Tokens of a batch's answers that one engine rank holds if all run at once, each as long as it may be."""
    engine, batch = job.engine, job.batch
    if engine is None or batch is None or batch.response_tokens is None:
        return ""
    engines = max(1, job.engine_pool // engine.gpus_per_engine) * (engine.dp if engine.dp_attention else 1)
    samples = -(-batch.num_prompts * batch.group_size // engines)
    length = (batch.prompt_tokens or 0) + batch.response_tokens
    return f"; {samples} samples of {length} tokens at once need {samples * length:,}"


def _plain(job: Job) -> Job:
    """The job with all its optimizer states on the device."""
    bits = replace(job.memory, optimizer_offload_fraction=0.0, offload_optimizer=None, precision_aware_optimizer=False)
    return replace(job, memory=bits)


def _without_offload(job: Job) -> Iterator[str]:
    share = job.memory.optimizer_offload_fraction
    if not share:
        return
    plain = _plain(job)
    offloaded, whole = (max(stage.optimizer for stage in plan_memory(one).stages) for one in (job, plain))
    yield (
        f"an offload of {share:.0%} leaves {gigabytes(offloaded)} of {gigabytes(whole)} of optimizer states on the "
        f"device: it frees {gigabytes(whole - offloaded)}"
    )
    yield f"without it: {_taken(plain)}; {_fitting(plain)}"


def _fractions_between(before: Job, after: Job) -> Iterator[str]:
    """``after`` with each tenth from its own fraction to that of ``before``, and what follows."""
    was, now = _fraction(before), _fraction(after)
    if was is None or now is None or was == now:
        return
    steps = max(1, round(abs(was - now) * 10))
    for step in range(steps + 1):
        share = round(now + (was - now) * step / steps, 2)
        plan = plan_memory(_with_fraction(after, share))
        yield f"{after.name} at {share:g}: {plan.kv_tokens or 0:,} tokens; {_fullness(plan)}"
    yield from _owed_to_the_offload(before)
    yield from _owed_to_the_offload(after)
    if wrong := _misfit(_with_fraction(after, was)):
        yield f"so {was:g} does not fit {after.name}: {wrong}"
    else:
        yield f"so {was:g} fits {after.name} too: nothing that is counted asks for {now:g}"


def _owed_to_the_offload(job: Job) -> Iterator[str]:
    """That a job's fraction would be too small without its offload."""
    share, plain = _fraction(job), _plain(job)
    if share is None or not job.memory.optimizer_offload_fraction or _misfit(job):
        return
    wrong, least = _misfit(plain), fractions_that_fit(plain)
    if wrong and (least is None or share < least[0]):
        needed = "none would do" if least is None else f"{least[0]:g} is the least"
        yield f"so {share:g} is there for {job.name} because of the offload: without it {needed} ({wrong})"


def _fraction(job: Job) -> float | None:
    engine = job.engine
    return None if engine is None or engine.engine == "torch" else engine.memory_fraction


def _with_fraction(job: Job, share: float) -> Job:
    return replace(job, engine=replace(job.engine or EngineLayout(), memory_fraction=share))


def _misfit(job: Job) -> str:
    """Why a job does not fit; "" if it does. A warning that activations may lack room counts too."""
    for finding in plan_memory(job).findings:
        if finding.severity == "error" or finding.rule == "engine-rest":
            return finding.message
    return ""
