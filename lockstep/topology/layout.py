"""The layout rules: every violation of a job at once, the most fundamental first, each with its numbers and a repair.

    job ──► rules (rules_*.py, one function each) ──► message ──► repair (repairs.py asks the rules) ──► Finding

Placement comes first, then Megatron's grids and what tensor parallelism divides, experts, the pipeline, context
parallelism, precision and memory, FSDP, the engines, the batch. Errors come before warnings, warnings before notes.
"""

from __future__ import annotations

# The order of these imports is the order of the rules.
# isort: off
import lockstep.topology.rules_placement
import lockstep.topology.rules_megatron
import lockstep.topology.rules_experts
import lockstep.topology.rules_pipeline
import lockstep.topology.rules_context
import lockstep.topology.rules_memory_flags
import lockstep.topology.rules_switches
import lockstep.topology.rules_fsdp
import lockstep.topology.rules_rollout
import lockstep.topology.rules_vllm
import lockstep.topology.rules_sglang
import lockstep.topology.rules_batch  # noqa: F401  all of them join RULES
# isort: on

from lockstep.topology.records import Finding, Job
from lockstep.topology.repairs import repair
from lockstep.topology.rules import RULES, Changes, Rule, apply, finding
from lockstep.topology.rules_placement import sizes_below_one

_ORDER = {"error": 0, "warning": 1, "note": 2}


def check_layout(job: Job) -> list[Finding]:
    """Every rule that the job breaks. Sizes below 1 are reported, and the other rules judged as if they were 1.

    Example: GLM-4.7-Flash on 4 devices with tp 2, pp 2, ep 4, etp 1 gives "expert-grid", "etp 1 · ep 4 · pp 2 = 8 does
    not divide world 4", repaired by "ep 4 → 2".
    """
    sizes: Changes = tuple((path, 1) for path in sizes_below_one(job))
    judged = apply(job, sizes)
    found = [_finding(rule, job, message) for rule in RULES[:1] if (message := rule.broken(job)) is not None]
    found += [_finding(rule, judged, message) for rule in RULES[1:] if (message := rule.broken(judged)) is not None]
    return sorted(found, key=lambda one: _ORDER[one.severity])


def is_legal(job: Job) -> bool:
    """Whether no rule of severity error is broken; without messages or repairs, so quick."""
    return all(rule.severity != "error" or rule.broken(job) is None for rule in RULES)


def _finding(rule: Rule, job: Job, message: str) -> Finding:
    if not rule.knobs:
        return finding(rule, message)
    text, changes = repair(rule, job)
    hopeless = not text and rule.severity == "error"
    return finding(rule, f"{message} (no setting of its own mends this)" if hopeless else message, text, changes)
