"""Legal layouts for a job's model and devices, ranked by the memory planner.

    sizes that one axis allows ──► products that both rank grids allow ──► every rule ──► planned ──► ranked

Each axis is asked of the rules alone, so that a size which no layout can have is dropped once and not in a thousand
products. What is left is ordered by a quick estimate, judged by all rules, and the best are planned.

Ranking: what fits comes first, what fits only within the planner's margin next. Among equals, tensor parallelism
within fast links, then the smallest tp · pp · cp (each of these axes communicates in every layer or idles in a bubble,
data parallelism once a step), then unsharded experts' widths, then the lowest peak.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lockstep.topology.evidence import KnownLayout, find_evidence
from lockstep.topology.grids import expert_tensor_size
from lockstep.topology.layout import is_legal
from lockstep.topology.memory import plan_memory
from lockstep.topology.memory_records import MemoryPlan, gigabytes
from lockstep.topology.parameters import count_parameters
from lockstep.topology.pipeline import splits
from lockstep.topology.records import Backend, Hardware, Job, ModelShape, TrainLayout, TrainMemory
from lockstep.topology.repairs import divisors
from lockstep.topology.rules import data_parallel, fast_gpus, samples_per_step
from lockstep.topology.rules_pipeline import allowed_starts
from lockstep.topology.trainer_memory import optimizer_bytes

_PLANNED = 16
"""Layouts that are planned in order of their rank by estimate, and as many again of the least memory."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A legal layout with its plan. ``fits``: 2 with the planner's margin to spare, 1 without, 0 not. ``known``: the
    public layout that it repeats."""

    job: Job
    layout: TrainLayout
    plan: MemoryPlan
    fits: int
    known: KnownLayout | None = None

    @property
    def peak_bytes(self) -> int:
        """Bytes of the phase that needs most."""
        return self.plan.peak.total_bytes if self.plan.peak else 0

    def text(self) -> str:
        """One line for a terminal."""
        sizes = sizes_text(self.layout)
        verdict = ("does not fit", "fits, within the margin", "fits")[self.fits]
        peak = f"{gigabytes(self.peak_bytes)} in {self.plan.peak.phase}" if self.plan.peak else "nothing planned"
        seen = f"; runs publicly: {self.known.evidence.source}" if self.known else ""
        return f"{sizes} · dp {data_parallel(self.job)}: {peak}, {verdict}{seen}"


class _Sizes(NamedTuple):
    """One product of axes that both grids allow: what orders it, the layout without experts, the experts' sizes. A
    layout is built only for those that are judged."""

    rank: tuple[int, ...]
    estimate: float
    dense: TrainLayout
    ep: int
    etp: int | None

    @property
    def layout(self) -> TrainLayout:
        """The whole layout."""
        return replace(self.dense, ep=self.ep, etp=self.etp)


def suggest(job: Job, limit: int = 10) -> list[Suggestion]:
    """The best legal layouts for the job's model and devices, at most ``limit``; empty where there is none. Everything
    but the split of the trainer stays as the job has it; a job without trainer is taken to be Megatron's."""
    job = job if job.train else replace(job, train=TrainLayout(backend="megatron"))
    found = list(_products(job))
    capacity = (job.hardware.memory_bytes or float("inf")) * 0.92
    by_rank = sorted(found, key=lambda one: (one.estimate > capacity, one.rank, one.estimate))
    by_memory = heapq.nsmallest(4 * _PLANNED, found, key=lambda one: (one.estimate, one.rank))
    chosen = {**_first_legal(job, by_rank), **_first_legal(job, by_memory)}
    planned = [(rank, _planned(with_layout(job, layout))) for layout, rank in chosen.items()]
    planned.sort(key=lambda entry: _order(*entry))
    return [suggestion for _, suggestion in planned[:limit]]


def _order(rank: tuple[int, ...], suggestion: Suggestion) -> tuple[float, ...]:
    """What fits by rank, what does not by how near it comes."""
    if suggestion.fits == 0:
        return (0, suggestion.peak_bytes, *rank)
    return (-suggestion.fits, *rank, suggestion.peak_bytes)


def legal_layouts(job: Job) -> Iterator[TrainLayout]:
    """Every legal combination of parallel sizes for the job's model and devices, each with its most even split."""
    job = job if job.train else replace(job, train=TrainLayout(backend="megatron"))
    for one in sorted(_products(job), key=lambda one: (one.rank, one.estimate)):
        if is_legal(with_layout(job, one.layout)):
            yield one.layout


def job_for(model: ModelShape, hardware: Hardware, num_gpus: int, backend: Backend = "megatron") -> Job:
    """A job of nothing but a model and a number of devices, on nodes as full as divides that number. Layers are
    recomputed in full, as in every public layout of large models."""
    held = max(size for size in divisors(num_gpus) if size <= max(hardware.gpus_per_node, 1))
    train = TrainLayout(backend=backend)
    return Job(
        name=f"{model.name} on {num_gpus} {hardware.name}",
        model=model,
        hardware=hardware,
        nodes=num_gpus // held,
        gpus_per_node=held,
        train=train,
        memory=TrainMemory(recompute="full", recompute_method="uniform", recompute_num_layers=1),
    )


def with_layout(job: Job, layout: TrainLayout) -> Job:
    """The job with another split of the trainer."""
    return replace(job, train=layout)


def sizes_text(layout: TrainLayout) -> str:
    """The sizes that differ from 1, and the split of the pipeline."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "replicate": layout.replicate or 1}
    named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if layout.ep > 1 or expert_tensor_size(layout) > 1:
        named.append(f"etp {expert_tensor_size(layout)}")
    ends = {"first": layout.first_stage_layers, "last": layout.last_stage_layers}
    named += [f"{name} {held}" for name, held in ends.items() if held is not None]
    return " · ".join(named) or "one copy a rank"


def _first_legal(job: Job, ordered: Iterable[_Sizes]) -> dict[TrainLayout, tuple[int, ...]]:
    """The first layouts that pass every rule, with their ranks."""
    built = ((one.layout, one.rank) for one in ordered)
    return dict(itertools.islice((pair for pair in built if is_legal(with_layout(job, pair[0]))), _PLANNED))


def _planned(job: Job) -> Suggestion:
    assert job.train is not None
    plan = plan_memory(job)
    severities = {finding.severity for finding in plan.findings}
    fits = 0 if "error" in severities else 1 if "warning" in severities else 2
    return Suggestion(job, job.train, plan, fits, find_evidence(job))


# --- sizes ------------------------------------------------------------------------------------------------------------


def _products(job: Job) -> Iterator[_Sizes]:
    """Combinations whose axes are legal one by one and whose grids come out whole."""
    assert job.train is not None
    yield from _fsdp(job, job.train) if job.train.backend == "fsdp" else _megatron(job, job.train)


def _fsdp(job: Job, train: TrainLayout) -> Iterator[_Sizes]:
    bare = replace(train, tp=1, pp=1, cp=1, etp=None, replicate=None)
    for replicas in divisors(job.train_world):
        layout = replace(bare, replicate=replicas if replicas > 1 else None)
        bytes_a_rank = count_parameters(job.model).total * 16.0 * replicas / job.train_world
        yield _Sizes((0, replicas), bytes_a_rank, layout, train.ep, None)


def _megatron(job: Job, train: TrainLayout) -> Iterator[_Sizes]:
    world, estimate = job.train_world, _Estimate(job)
    bare = _bare(train)
    alone = replace(job, nodes=1, gpus_per_node=1, colocated=True, rollout_gpus=0, engine=None, batch=None)
    pipelines = _pipelines(alone, bare, world)
    contexts = [cp for cp in divisors(world) if _allowed(alone, _context(bare, job.model, cp))]
    experts = list(_experts(alone, bare, world))
    for tp in (size for size in divisors(world) if _allowed(alone, _tensor(bare, size))):
        crosses = world > fast_gpus(job) and fast_gpus(job) % tp != 0
        tensor = _tensor(bare, tp)
        for pipeline, cp in itertools.product(pipelines, contexts):
            degree = tp * pipeline.pp * cp
            if world % degree or not _batch_splits(job, world // degree):
                continue
            split = {"first_stage_layers": pipeline.first_stage_layers, "last_stage_layers": pipeline.last_stage_layers}
            layout = replace(_context(tensor, job.model, cp), pp=pipeline.pp, **split)
            for ep, etp in experts:
                if world % (etp * ep * pipeline.pp) == 0 and etp in (1, tp):
                    rank = (int(crosses), degree, etp, pipeline.pp, ep)
                    bytes_a_rank = estimate(tp, pipeline.pp, etp * ep * pipeline.pp)
                    yield _Sizes(rank, bytes_a_rank, layout, ep, etp if job.model.is_moe else None)


def _bare(train: TrainLayout) -> TrainLayout:
    """The layout with every axis at 1 and no split of the pipeline; other settings as they are."""
    switches = replace(train.switches, pipeline_layout=None, layers_per_virtual_stage=None, microbatch_group=None)
    return replace(
        train,
        tp=1,
        pp=1,
        cp=1,
        ep=1,
        etp=1,
        virtual_stages=None,
        first_stage_layers=None,
        last_stage_layers=None,
        stage_layers=(),
        account_for_embedding=False,
        account_for_loss=False,
        sequence_parallel=False,
        switches=switches,
    )


def _allowed(alone: Job, layout: TrainLayout) -> bool:
    """Whether the layout is legal by itself, on a world that it just fills."""
    world = layout.tp * layout.pp * layout.cp * expert_tensor_size(layout) * layout.ep
    return is_legal(replace(alone, nodes=world, train=layout))


def _tensor(layout: TrainLayout, tp: int) -> TrainLayout:
    return replace(layout, tp=tp, sequence_parallel=tp > 1)


def _context(layout: TrainLayout, model: ModelShape, cp: int) -> TrainLayout:
    """Context parallelism as the architecture allows it: contiguous where neighbours belong together."""
    contiguous = cp > 1 and model.attention in ("deepseek_v4", "mla_dsa", "inkling")
    return replace(layout, cp=cp, cp_partition="contiguous" if contiguous else layout.cp_partition)


def _pipelines(alone: Job, bare: TrainLayout, world: int) -> list[TrainLayout]:
    """Per pipeline size the most even legal split."""
    found: list[TrainLayout] = []
    for pp in divisors(world):
        if pp > alone.model.num_layers:
            break
        even = replace(bare, pp=pp)
        if _allowed(alone, even):
            found.append(even)
            continue
        legal = splits(alone.model.num_layers, even, allowed_starts(with_layout(alone, even)))
        found += itertools.islice((split for split in legal if _allowed(alone, split)), 1)
    return found


def _experts(alone: Job, bare: TrainLayout, world: int) -> Iterator[tuple[int, int]]:
    """Sizes of the experts' grid: expert-tensor parallelism off, or equal to tp."""
    if not alone.model.is_moe:
        yield 1, 1
        return
    eps = [ep for ep in divisors(world) if ep <= alone.model.num_experts]
    etps = [etp for etp in divisors(world) if _allowed(alone, replace(bare, etp=etp))]
    for ep in eps:
        if _allowed(alone, replace(bare, ep=ep)):
            yield from ((ep, etp) for etp in etps)


def _batch_splits(job: Job, dp: int) -> bool:
    """Whether a step's samples divide over so many ranks; true where there is no batch."""
    if job.batch is None:
        return True
    samples = samples_per_step(job)
    return samples >= dp and samples % (dp * (job.batch.micro_batch or 1)) == 0


class _Estimate:
    """Bytes of weights, gradients and states a rank, of an even split: quick enough for every product."""

    def __init__(self, job: Job) -> None:
        counts = count_parameters(job.model)
        self.world = job.train_world
        self.experts = counts.experts
        self.replicated = sum(layer.replicated for layer in counts.layers) + counts.outer
        self.sharded = counts.total - counts.experts - self.replicated
        memory = job.memory
        self.held = (2 if memory.weight_dtype == "bf16" else 4) + (4 if memory.grad_dtype == "fp32" else 2)
        self.states = optimizer_bytes(memory) * (1 - memory.optimizer_offload_fraction)
        self.distributed = memory.distributed_optimizer

    def __call__(self, tp: int, pp: int, expert_shards: int) -> float:
        dense = self.sharded / (tp * pp) + self.replicated / pp
        experts = self.experts / expert_shards
        if not self.distributed:
            return (dense + experts) * (self.held + self.states)
        copies, expert_copies = self.world / (tp * pp), self.world / expert_shards
        return dense * (self.held + self.states / copies) + experts * (self.held + self.states / expert_copies)
