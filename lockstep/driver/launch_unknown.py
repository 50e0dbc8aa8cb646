"""Errors that rest on what a launch script leaves open: they are warnings, for the script may well be right.

error of a rule or the planner ──► another value of what is not known ──► does it vanish? ──► warning
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lockstep.topology.memory import plan_memory
from lockstep.topology.records import Finding, Job
from lockstep.topology.rules import RULES, apply, setting

_SIZES = (1, 2, 4, 8, 16, 32, 64)
_NODES = tuple(1 << power for power in range(1, 13))
_SHARES = (0.5, 0.9)


def eased(
    findings: Iterable[Finding], job: Job, unknown: frozenset[str], unplanned: Sequence[str] = ()
) -> list[Finding]:
    """The findings, those of severity error that another value of an ``unknown`` setting would take away as warnings.

    ``unknown``: dotted paths of settings, "nodes" for a number that was assumed, "environment" for variables that a
    running shell alone knows. ``unplanned``: options that take off memory and are not counted.
    """
    paths = sorted(path for path in unknown if path == "nodes" or _settable(job, path))
    open_environment = "environment" in unknown
    return [
        _eased(one, job, paths, open_environment, unplanned) if one.severity == "error" else one for one in findings
    ]


def _eased(finding: Finding, job: Job, paths: list[str], open_environment: bool, unplanned: Sequence[str]) -> Finding:
    if open_environment and finding.rule == "device-connections":
        return _warning(finding, "the job's environment")
    if finding.rule == "device-connections" and job.hardware.vendor == "nvidia" and not job.hardware.arch:
        return _warning(finding, "the device (Blackwell does without)")
    if unplanned and finding.rule == "memory-fits":
        return replace(finding, severity="warning", message=f"{finding.message}; not counted: {', '.join(unplanned)}")
    for path in paths:
        if any(not _found(finding.rule, other) for other in _others(job, path)):
            return _warning(finding, "the number of nodes" if path == "nodes" else path.rpartition(".")[2])
    return finding


def _warning(finding: Finding, what: str) -> Finding:
    return replace(finding, severity="warning", message=f"{finding.message}; it rests on {what}, which is not known")


def _settable(job: Job, path: str) -> bool:
    try:
        setting(job, path)
    except AttributeError:
        return False
    return True


def _others(job: Job, path: str) -> Iterator[Job]:
    """The job with other values of a setting."""
    now = setting(job, path)
    values: tuple[Any, ...] = _NODES if path == "nodes" else _SIZES
    if isinstance(now, bool):
        values = (not now,)
    elif isinstance(now, float):
        values = _SHARES
    elif isinstance(now, str):
        return
    yield from (apply(job, ((path, value),)) for value in values if value != now)


def _found(rule_id: str, job: Job) -> bool:
    """Whether a rule, or the planner under that name, finds an error in a job."""
    for rule in RULES:
        if rule.id == rule_id:
            return rule.broken(job) is not None
    return any(one.rule == rule_id and one.severity == "error" for one in plan_memory(job).findings)
