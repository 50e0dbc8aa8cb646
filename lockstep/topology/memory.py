"""The memory plan: bytes per device and phase of a job, before anything starts. Pure arithmetic over sizes.

              colocated                                      apart
    generate  engine awake + what the trainer keeps          engine awake
    score     trainer's forward      + engine asleep         trainer's forward
    train     forward and backward   + engine asleep         forward and backward
    refit     trainer + engine's weights + buckets           trainer + buckets | engine's weights + buckets
    save      trainer + engine asleep                        trainer

Each phase is that of the pipeline stage that needs most. "Asleep": engines beside a Megatron trainer free weights and
cache (torch_memory_saver, vLLM's sleep); Lockstep's own loop keeps its engine loaded. Every item says whether it was
counted, measured or assumed; ``NOT_MODELLED`` says what is left out and ``MARGIN`` what that may cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lockstep.topology.engine_memory import EngineMemory, engine_memory
from lockstep.topology.memory_findings import compare_plans, fit_findings, plan_text
from lockstep.topology.memory_records import (
    MARGIN,
    PHASES,
    MemoryItem,
    MemoryPlan,
    Phase,
    PhasePlan,
    StageMemory,
)
from lockstep.topology.module_memory import (
    module_overhead_items,
    module_phase_items,
    module_stage,
    module_static_items,
)
from lockstep.topology.pipeline import SplitError, split_layers
from lockstep.topology.records import Finding, Job
from lockstep.topology.rules_placement import sizes_below_one
from lockstep.topology.trainer_memory import overhead_items, phase_items, stage_memory, static_items

__all__ = ["MARGIN", "NOT_MODELLED", "compare_plans", "plan_memory", "plan_text"]

NOT_MODELLED = (
    "fragmentation of the allocator and padding of gradient buckets (within the margin)",
    "towers of multimodal models, adapters, MTP layers in training, other drafters, reference and teacher models",
    "temporaries of fused kernels, workspaces of attention and all-to-all back ends such as DeepEP's or MORI's buffers",
    "what an engine takes between its start and its cache beside weights: the cache is what is left, so its tokens are "
    "known less well than any sum",
    "host memory of data loading, checkpoint staging and of engine processes",
    "time: a layout that fits may still be slow",
)

ASSUMED_BUCKET_BYTES = 512 << 20
"""A refit's bucket where the job does not say (miles --update-weight-buffer-size)."""


@dataclass(frozen=True, slots=True)
class _Trainer:
    """One side of the plan: static memory of each stage, items of a phase, what stays in any case."""

    stages: tuple[StageMemory, ...]
    static: Callable[[Job, StageMemory], list[MemoryItem]]
    phase: Callable[[StageMemory, Phase], list[MemoryItem]]
    overhead: list[MemoryItem]
    own: bool


def plan_memory(job: Job) -> MemoryPlan:
    """Plan ``job``. A layout that does not fit, or can't be split, is reported in ``findings``, never raised; sizes
    that are none leave a plan without phases and an error."""
    if wrong := _no_sizes(job):
        text = ", ".join(f"{path} = {value:g}" for path, value in wrong.items())
        finding = Finding(
            "memory-sizes",
            "error",
            f"memory is not planned: {text}",
            "sizes are at least 1, stages about as many as layers at most",
        )
        return MemoryPlan(job.name, job.hardware.memory_bytes, (), (), (), None, MARGIN, NOT_MODELLED, (finding,))
    findings: list[Finding] = []
    trainer = _trainer(job, findings)
    held = _held_while_generating(job, trainer)
    engine = engine_memory(job, max(held, default=0) if job.colocated else 0) if job.engine is not None else None
    phases = _phases(job, trainer, engine)
    plan = MemoryPlan(
        job=job.name,
        capacity_bytes=job.hardware.memory_bytes,
        phases=phases,
        stages=trainer.stages if trainer else (),
        host=tuple(_host(job, trainer)) if trainer else (),
        kv_tokens=engine.kv_tokens if engine else None,
        kv_tokens_least=engine.kv_tokens_least if engine else None,
        margin=MARGIN,
        not_modelled=NOT_MODELLED,
    )
    findings += engine.findings if engine else ()
    return replace(plan, findings=(*findings, *fit_findings(job, plan)))


def _no_sizes(job: Job) -> dict[str, float]:
    """Numbers by path that no plan can be made of."""
    model, batch, memory = job.model, job.batch, job.memory
    wrong: dict[str, float] = dict(sizes_below_one(job))
    counts = {f"model.{name}": getattr(model, name) for name in ("num_layers", "hidden", "num_heads", "head_dim")}
    counts["memory.recompute_num_layers"] = memory.recompute_num_layers
    if batch is not None:
        names = ("logprob_chunk_tokens", "score_tokens_per_gpu", "score_micro_batch")
        counts |= {f"batch.{name}": getattr(batch, name) for name in names}
        counts["batch.prompt_tokens"] = batch.prompt_tokens or None  # no prompt: pre-training
        counts["batch.response_tokens"] = batch.response_tokens or (
            None if batch.prompt_tokens else batch.response_tokens
        )
    wrong |= {path: value for path, value in counts.items() if value is not None and value < 1}
    if job.train is not None and job.train.pp > model.num_layers + 2:  # beside them embedding and loss
        wrong["train.pp"] = job.train.pp
    if not 0 <= memory.optimizer_offload_fraction <= 1:
        wrong["memory.optimizer_offload_fraction"] = memory.optimizer_offload_fraction
    return wrong


def _trainer(job: Job, findings: list[Finding]) -> _Trainer | None:
    if job.train is None:
        return None
    if job.train.backend == "fsdp":
        return _Trainer(
            (module_stage(job),),
            module_static_items,
            lambda held, phase: module_phase_items(job, held, phase),
            module_overhead_items(job),
            own=True,
        )
    try:
        split = split_layers(job.model.num_layers, job.train)
    except SplitError as error:
        message = f"planned with an even split, rounded up: {error}"
        findings.append(Finding("memory-split", "warning", message, source="Megatron get_num_layers_to_build"))
        size = -(-job.model.num_layers // job.train.pp)
        everything = range(job.model.num_layers)
        split = tuple(tuple(everything[stage * size : (stage + 1) * size]) for stage in range(job.train.pp))
    return _Trainer(
        stage_memory(job, split),
        static_items,
        lambda held, phase: phase_items(job, held, len(split), phase),
        overhead_items(job),
        own=False,
    )


def _phases(job: Job, trainer: _Trainer | None, engine: EngineMemory | None) -> tuple[PhasePlan, ...]:
    found = []
    for phase in PHASES:
        if trainer is None or not job.colocated:
            if engine is not None and phase in ("generate", "refit"):
                items = engine.awake if phase == "generate" else (*engine.loaded, *_buckets(job, "engine"))
                found.append(PhasePlan(phase, "engine", None, items))
            if trainer is not None and phase != "generate":
                found.append(_worst(phase, "trainer", trainer, lambda s, p=phase: _trainer_items(job, trainer, s, p)))
            continue
        if engine is None and phase in ("generate", "refit"):
            continue
        beside = _engine_items(job, trainer, engine, phase)
        found.append(
            _worst(phase, "shared", trainer, lambda s, p=phase, b=beside: [*_trainer_items(job, trainer, s, p), *b])
        )
    return tuple(found)


def _worst(
    phase: Phase, devices: str, trainer: _Trainer, items: Callable[[StageMemory], Iterable[MemoryItem]]
) -> PhasePlan:
    stage = None if len(trainer.stages) == 1 else 0
    plans = [
        PhasePlan(phase, devices, stage if stage is None else held.stage, tuple(items(held)))  # pyright: ignore[reportArgumentType]
        for held in trainer.stages
    ]
    return max(plans, key=lambda plan: plan.total_bytes)


def _trainer_items(job: Job, trainer: _Trainer, held: StageMemory, phase: Phase) -> list[MemoryItem]:
    items = [*trainer.overhead]
    items += [item for item in trainer.static(job, held) if not _is_away(job, item.name, phase)]
    items += trainer.phase(held, phase)
    if phase == "refit":
        items += _buckets(job, "trainer")
    return items


def _is_away(job: Job, name: str, phase: Phase) -> bool:
    """Whether an item of the trainer's own state is not on the device in a phase.

    Where the optimizer is offloaded apart, each phase loads what it needs: scoring no gradients, training alone the
    optimizer's states (verl engine/megatron/transformer_impl.py: to, EngineEvalModeCtx).
    """
    apart, memory = job.memory.offload_optimizer is not None, job.memory
    if apart and name == "optimizer states":
        return bool(memory.offload_optimizer) and phase != "train"
    if not (memory.offload_weights and job.colocated):
        return False
    if phase == "score":
        return apart and name == "gradients"
    return phase == "generate" or (phase == "refit" and name != "weights")


def _engine_items(job: Job, trainer: _Trainer, engine: EngineMemory | None, phase: Phase) -> tuple[MemoryItem, ...]:
    """What the engine has on shared devices."""
    if engine is None:
        return ()
    if phase == "generate":
        return engine.awake
    if phase == "refit":
        return (*engine.loaded, *_buckets(job, "engine"))
    if job.engine_sleeps or (not trainer.own and job.engine_sleeps is None):
        return engine.asleep
    # Lockstep's loop keeps its engine loaded: vLLM's pool of caches stays too, the embedded engine's goes.
    embedded = job.engine is not None and job.engine.engine == "torch"
    return engine.asleep if embedded else tuple(item for item in engine.awake if item.name != "prefill and logits")


def _held_while_generating(job: Job, trainer: _Trainer | None) -> list[int]:
    if trainer is None:
        return []
    return [sum(item.num_bytes for item in _trainer_items(job, trainer, held, "generate")) for held in trainer.stages]


def _buckets(job: Job, owner: str) -> list[MemoryItem]:
    """Two buckets in flight on each side; a copy within one process needs none."""
    inside = job.train is not None and job.train.backend == "fsdp" and job.refit_bucket_bytes is None
    if inside:
        return []
    size = job.refit_bucket_bytes
    basis, each = ("counted", size) if size is not None else ("assumed", ASSUMED_BUCKET_BYTES)
    side = "trainer" if owner == "trainer" else "engine"
    return [MemoryItem("refit buckets", 2 * each, basis, "two in flight", "", side)]  # pyright: ignore[reportArgumentType]


def _host(job: Job, trainer: _Trainer) -> list[MemoryItem]:
    """Host memory of one node, every device of it at the stage that needs most."""
    here = min(job.gpus_per_node, job.train_world)
    items = []
    states = max(held.host for held in trainer.stages)
    if states and not job.memory.stream_optimizer:
        note = f"{here} ranks; master, m, v and a pinned gradient"
        items.append(MemoryItem("optimizer states", states * here, "counted", note, "Megatron hybrid_optimizer.py"))
    if job.memory.offload_weights and job.memory.offload_target == "cpu" and job.colocated:
        again, stays = job.memory.rematerialise_weights, job.memory.offload_optimizer is False
        resident = max(held.total - held.weights * again - held.optimizer * stays for held in trainer.stages)
        left = "all but weights, which are made again" if again else "everything"
        note = f"{here} ranks; {left} of the trainer while the engine generates"
        items.append(MemoryItem("trainer's state", resident * here, "counted", note, "torch_memory_saver"))
    elif job.memory.offload_optimizer and (resident := max(held.optimizer for held in trainer.stages)):
        note = f"{here} ranks; the optimizer's states while nothing is trained"
        items.append(MemoryItem("offloaded states", resident * here, "counted", note, "verl optimizer_offload"))
    if job.engine is not None:
        buckets = sum(item.num_bytes for item in _buckets(job, "trainer"))
        if buckets:
            items.append(MemoryItem("refit buckets", buckets * here, "assumed", "pinned copies"))
    return items
