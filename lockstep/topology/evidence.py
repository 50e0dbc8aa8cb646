"""Public layouts with their evidence: what somebody says to have run, where, and what they measured.

A layout that is listed is no more legal than another: the rules judge all alike. ``verified`` means that its source
says it ran on this very hardware; a recipe that rests on any other runs only when asked to. The data, with its sources,
is ``catalog/layouts.toml``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.topology.catalogue import hardware, model_shape, read_catalogue
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
    not verified; ``rule`` and ``repair`` are set for layouts that must be refused."""

    name: str
    model: str
    hardware: str
    job: Job
    evidence: Evidence
    verified: bool
    status: str = ""
    rule: str = ""
    repair: str = ""

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
    """The known layout that a job repeats: same model and hardware, same devices, same split of the model over the
    trainer's and the engine's ranks. Verified ones first. Memory settings and batch may differ."""
    same = [known for known in known_layouts() if _signature(known.job) == _signature(job)]
    return min(same, key=lambda known: not known.verified, default=None)


def _signature(job: Job) -> tuple[Any, ...]:
    train, engine = job.train, job.engine
    split = train and (train.backend, train.tp, train.pp, train.cp, train.ep, train.etp or train.tp)
    serving = engine and (engine.engine, engine.gpus_per_engine, engine.tp, engine.pp, engine.dp, engine.ep)
    return (job.model.name, job.hardware.name, job.num_gpus, job.colocated, job.rollout_gpus, split, serving)


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
    )


def _train(table: Mapping[str, Any]) -> TrainLayout:
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in table.items()
    }
    switches = MegatronSwitches(**settings.pop("switches", {}))
    return TrainLayout(backend="megatron", switches=switches, **settings)
