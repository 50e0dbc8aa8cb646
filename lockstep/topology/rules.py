"""What a layout rule is: a function from a job to what is wrong with it, with its text, source and repair.

A rule's docstring is its text. Its ``knobs`` are the settings that could mend it, the most natural first; which of
their values does is found by asking the rule itself (``repairs.py``), so that no advice is written by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.topology.records import Batch, EngineLayout, Finding, Job, Severity, TrainLayout

Changes = tuple[tuple[str, Any], ...]
"""Settings of a job by dotted path: (("train.ep", 2),)."""

Family = Callable[[Job], Iterable[Changes]]
"""Candidates that change several settings at once, nearest first."""

Knob = str | Family


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``check`` gives the message of a violation, with the numbers, or None. ``needs``: what the job must
    have for the rule to apply, see ``_NEEDS``."""

    id: str
    severity: Severity
    text: str
    source: str
    check: Callable[[Job], str | None]
    knobs: tuple[Knob, ...]
    needs: tuple[str, ...]

    def broken(self, job: Job) -> str | None:
        """The violation's message; None where the rule is kept or does not apply."""
        return self.check(job) if all(_NEEDS[need](job) for need in self.needs) else None


RULES: list[Rule] = []
"""Every rule, the most fundamental first; ``layout.py`` imports the files that fill it in that order."""

_NEEDS: dict[str, Callable[[Job], bool]] = {
    "train": lambda job: job.train is not None,
    "megatron": lambda job: job.train is not None and job.train.backend == "megatron" and job.train_world > 0,
    "fsdp": lambda job: job.train is not None and job.train.backend == "fsdp" and job.train_world > 0,
    "engine": lambda job: job.engine is not None,
    "torch": lambda job: job.engine is not None and job.engine.engine == "torch",
    "vllm": lambda job: job.engine is not None and job.engine.engine == "vllm",
    "sglang": lambda job: job.engine is not None and job.engine.engine == "sglang",
    "batch": lambda job: job.batch is not None,
    "moe": lambda job: job.model.is_moe,
}


def rule(
    id: str, *, source: str, needs: str = "", knobs: tuple[Knob, ...] = (), severity: Severity = "error"
) -> Callable[[Callable[[Job], str | None]], Callable[[Job], str | None]]:
    """Register the function as a rule. ``needs`` is words of ``_NEEDS``: a rule of mixture-of-experts models says
    "moe" and can't fire on a dense one."""

    def register(check: Callable[[Job], str | None]) -> Callable[[Job], str | None]:
        text = inspect.cleandoc(check.__doc__ or "")
        RULES.append(Rule(id, severity, text, source, check, knobs, tuple(needs.split())))
        return check

    return register


def rule_named(id: str) -> Rule:
    """The rule of that id. Raises ``KeyError``."""
    return {rule.id: rule for rule in RULES}[id]


def finding(rule: Rule, message: str, repair: str = "", changes: Changes = ()) -> Finding:
    """A violation as a record."""
    return Finding(rule.id, rule.severity, message, repair, rule.source, changes)


def apply(job: Job, changes: Changes) -> Job:
    """The job with the settings changed.

    Example: ``apply(job, (("train.ep", 2), ("nodes", 4)))``.
    """
    for path, value in changes:
        job = _replace(job, path.split("."), value)
    return job


def setting(job: Job, path: str) -> Any:
    """The value of a setting by dotted path."""
    value: Any = job
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _replace(record: Any, names: list[str], value: Any) -> Any:
    head, *rest = names
    return replace(record, **{head: _replace(getattr(record, head), rest, value) if rest else value})


# --- what rules ask of a job; the part is there wherever a rule's ``needs`` names it ----------------------------------


def train_of(job: Job) -> TrainLayout:
    """The trainer's layout."""
    assert job.train is not None
    return job.train


def engine_of(job: Job) -> EngineLayout:
    """The engine's layout."""
    assert job.engine is not None
    return job.engine


def batch_of(job: Job) -> Batch:
    """The batch."""
    assert job.batch is not None
    return job.batch


def data_parallel(job: Job) -> int:
    """Data-parallel size of the trainer; at least 1, also where the grid does not come out whole."""
    train = train_of(job)
    if train.backend == "fsdp":
        return max(1, job.train_world // train.ulysses)
    return max(1, job.train_world // (train.tp * train.pp * train.cp))


def samples_per_step(job: Job) -> int:
    """Samples of one optimizer step: the stated global batch, else an equal share of the rollout batch."""
    batch = batch_of(job)
    if batch.global_batch is not None:
        return batch.global_batch
    return batch.num_prompts * batch.group_size // batch.optimizer_steps


def micro_batches(job: Job) -> int | None:
    """Micro-batches of one optimizer step per rank; None where their size is not stated or leaves a rest."""
    if job.batch is None or job.batch.micro_batch is None:
        return None
    size = job.batch.micro_batch * data_parallel(job)
    return samples_per_step(job) // size if samples_per_step(job) % size == 0 else None


def fast_gpus(job: Job) -> int:
    """Devices that one fast fabric joins: a node's, unless the hardware says more."""
    return job.hardware.fast_link_gpus or job.gpus_per_node


def plain_sizes(record: Any, prefix: str, names: str) -> dict[str, int]:
    """The stated integer settings among ``names``, by path."""
    values = {f"{prefix}{name}": getattr(record, name) for name in names.split()}
    return {path: value for path, value in values.items() if value is not None}
