"""Public layouts with their evidence: what somebody says to have run, where, and what they measured.

A layout that is listed is no more legal than another: the rules judge all alike. ``verified`` means that its source
says it ran on this very hardware; a recipe that rests on any other runs only when asked to. It is said of how the model
is split over ranks. Memory settings may differ from those that ran: ``memory_differences`` lists them, and that they
fit is then the planner's word alone. The data, with its sources, is ``catalog/layouts.toml``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lockstep.topology.catalogue import hardware, model_shape, read_catalogue
from lockstep.topology.pipeline import SplitError, split_layers
from lockstep.topology.records import Batch, EngineLayout, Job, MegatronSwitches, TrainLayout, TrainMemory

_JOB_FIELDS = ("nodes", "gpus_per_node", "colocated", "rollout_gpus", "fully_async", "pause_mode")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where a layout is said to have run: source (project, file or issue), commit, date, metric and value. ``value`` is
    empty where the source gives none; ``note`` is what else it says."""

    source: str
    date: str
    metric: str
    value: str
    commit: str = ""
    note: str = ""

    def text(self) -> str:
        """One line for a person."""
        where = f"{self.source}, {self.commit}" if self.commit else self.source
        what = f"{self.metric}: {self.value}" if self.value else self.metric
        return f"{where} ({self.date}): {what}" + (f"; {self.note}" if self.note else "")


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """One layout of the catalogue. ``job`` is the whole job as far as its source states it; ``status`` says why it is
    not verified; ``rule`` and ``repair`` are set for layouts that must be refused. ``stated`` are the settings of
    memory, engine and batch that the source gives, by dotted path; the rest of ``job`` are defaults."""

    name: str
    model: str
    hardware: str
    job: Job
    evidence: Evidence
    verified: bool
    status: str = ""
    rule: str = ""
    repair: str = ""
    stated: frozenset[str] = frozenset()

    @property
    def num_gpus(self) -> int:
        """Devices of the job."""
        return self.job.num_gpus


@functools.cache
def known_layouts() -> tuple[KnownLayout, ...]:
    """Every layout with a public source, in the catalogue's order."""
    return tuple(_known(entry) for entry in read_catalogue("layouts")["layout"])


@functools.cache
def refused_layouts() -> tuple[KnownLayout, ...]:
    """Layouts that were found wrong in public, with the rule that refuses them and the repair."""
    return tuple(_known(entry) for entry in read_catalogue("layouts")["refused"])


def find_evidence(job: Job) -> KnownLayout | None:
    """The known layout that a job repeats: same model and hardware, same nodes, same split of the model over the
    trainer's and the engine's ranks, pipeline stages included. Verified ones first. Batch and memory settings may
    differ; see ``memory_differences``."""
    wanted = _signature(job)
    same = [known for known, signature in _signatures() if signature == wanted]
    return min(same, key=lambda known: not known.verified, default=None)


_ENGINE_MEMORY = ("memory_fraction", "kv_cache_dtype", "weight_dtype", "quantisation", "kv_cache_bytes")
_ENGINE_LIMITS = ("max_running_requests", "max_total_tokens", "chunked_prefill_tokens")
_BATCH_MEMORY = ("micro_batch", "max_tokens_per_gpu", "prompt_tokens", "response_tokens", "packing")


def memory_differences(job: Job, known: KnownLayout) -> tuple[str, ...]:
    """Settings that decide about memory and are not those of the run: "memory.optimizer_offload_fraction 0 → 0.6".

    What the source does not state is compared with the default, except for limits of requests and tokens and for the
    batch, whose defaults mean nothing.
    """
    groups: tuple[tuple[str, Any, Any, tuple[str, ...], tuple[str, ...]], ...] = (
        ("memory", known.job.memory, job.memory, tuple(field.name for field in fields(TrainMemory)), ()),
        ("engine", known.job.engine, job.engine, _ENGINE_MEMORY, _ENGINE_LIMITS),
        ("batch", known.job.batch, job.batch, (), _BATCH_MEMORY),
    )
    found = []
    for group, theirs, ours, always, if_stated in groups:
        if theirs is None or ours is None:
            continue
        for name in (*always, *if_stated):
            path, was, now = f"{group}.{name}", getattr(theirs, name), getattr(ours, name)
            if was == now or (name in if_stated and path not in known.stated):
                continue
            found.append(f"{path} {_shown(was)} → {_shown(now)}" + ("" if path in known.stated else " (not stated)"))
    return tuple(found)


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    return f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def _signatures() -> tuple[tuple[KnownLayout, tuple[Any, ...]], ...]:
    return tuple((known, _signature(known.job)) for known in known_layouts())


def _signature(job: Job) -> tuple[Any, ...]:
    train, engine = job.train, job.engine
    split = train and (train.backend, train.tp, train.pp, train.cp, train.ep, train.etp or train.tp)
    details = train and (train.sequence_parallel, train.virtual_stages or 1, _stages(job.model.num_layers, train))
    serving = engine and (engine.engine, engine.gpus_per_engine, engine.tp, engine.pp, engine.dp, engine.ep)
    routing = engine and (engine.dp_attention, engine.moe_a2a or "none")
    devices = (job.nodes, job.gpus_per_node, job.colocated, job.rollout_gpus)
    return (job.model.name, job.hardware.name, devices, split, details, serving, routing)


def _stages(num_layers: int, layout: TrainLayout) -> object:
    """Layers of each pipeline rank; a split that does not come out is like no other."""
    try:
        return split_layers(num_layers, layout)
    except SplitError as error:
        return str(error)


def _known(entry: Mapping[str, Any]) -> KnownLayout:
    settings = {name: entry[name] for name in _JOB_FIELDS if name in entry}
    job = Job(
        name=entry["name"],
        model=model_shape(entry["model"]),
        hardware=hardware(entry["hardware"]),
        train=_train(entry["train"]),
        memory=TrainMemory(**entry.get("memory", {})),
        engine=EngineLayout(**entry["engine"]) if "engine" in entry else None,
        batch=Batch(**entry["batch"]) if "batch" in entry else None,
        environment=entry.get("environment", {}),
        **settings,
    )
    return KnownLayout(
        name=entry["name"],
        model=entry["model"],
        hardware=entry["hardware"],
        job=job,
        evidence=Evidence(**entry["evidence"]),
        verified=entry.get("verified", False),
        status=entry.get("status", ""),
        rule=entry.get("rule", ""),
        repair=entry.get("repair", ""),
        stated=frozenset(f"{group}.{key}" for group in ("memory", "engine", "batch") for key in entry.get(group, ())),
    )


def _train(table: Mapping[str, Any]) -> TrainLayout:
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in table.items()
    }
    switches = MegatronSwitches(**settings.pop("switches", {}))
    return TrainLayout(backend="megatron", switches=switches, **settings)
