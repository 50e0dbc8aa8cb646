"""``lockstep plan``: the verdict on a recipe without any of its hardware.

RunConfig ──job_of──► Job ─┬─ check_layout   rules, with repairs
                           ├─ plan_memory    bytes per device and phase, host memory
                           ├─ find_evidence  who has run this layout
                           └─ suggest        other legal layouts
          ──judge────► ledger of environment variables
          ──effective► arguments for Megatron, torch, vLLM, SGLang
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.config.errors import Violation
from lockstep.config.load import ResolvedConfig
from lockstep.config.schema import RunConfig
from lockstep.config.secrets import masked_tree
from lockstep.driver.arguments import PROGRAMS, Effective, effective, shown
from lockstep.driver.determinism import determinism_findings
from lockstep.driver.environment import PLATFORMS, examine
from lockstep.driver.jobs import job_of
from lockstep.driver.runnable import layout_record, needs_evidence, not_runnable
from lockstep.environment.ledger import Ledger, LedgerFinding
from lockstep.recipes.overlays import overlay_findings
from lockstep.topology.evidence import KnownLayout, find_evidence, memory_differences
from lockstep.topology.layout import check_layout
from lockstep.topology.memory import plan_memory
from lockstep.topology.memory_records import MemoryPlan, PhasePlan, gigabytes
from lockstep.topology.records import Finding, Job

if TYPE_CHECKING:
    from lockstep.topology.suggest import Suggestion

EXIT_DONE, EXIT_FAILED = 0, 1

NUM_ITEMS = 4
"""Items of a phase that are printed; ``--json`` has all."""


@dataclass(frozen=True, slots=True)
class RecipePlan:
    """Everything that ``lockstep plan`` says of a configuration."""

    resolved: ResolvedConfig
    job: Job
    rules: tuple[Finding, ...]
    memory: MemoryPlan
    ledger: Ledger
    evidence: KnownLayout | None
    arguments: Effective
    refused_by_train: tuple[Violation, ...]

    @property
    def findings(self) -> list[Finding | LedgerFinding]:
        """Of rules, memory and ledger."""
        return [*self.rules, *self.memory.findings, *self.ledger.findings]

    @property
    def errors(self) -> list[Finding | LedgerFinding]:
        """Findings that make the plan fail."""
        return [finding for finding in self.findings if finding.severity == "error"]


def make_plan(resolved: ResolvedConfig, shell: Mapping[str, str]) -> RecipePlan:
    """Judge a configuration. ``shell`` is the environment whose stray variables count. Raises ``ConfigError`` where the
    model's sizes are not known."""
    config = resolved.config
    job = job_of(config)
    return RecipePlan(
        resolved=resolved,
        job=job,
        rules=tuple(
            sorted((*overlay_findings(resolved), *check_layout(job), *determinism_findings(config)), key=_rank)
        ),
        memory=plan_memory(job),
        ledger=ledger_of(config, job, shell),
        evidence=find_evidence(job) if needs_evidence(config) else None,
        arguments=effective(config),
        refused_by_train=tuple(not_runnable(config)),
    )


def _rank(finding: Finding) -> int:
    return ("error", "warning", "note").index(finding.severity)


def ledger_of(config: RunConfig, job: Job, shell: Mapping[str, str]) -> Ledger:
    """The ledger of the variables that a configuration sets, for the platform of its hardware; readers are looked for
    where a run would find them, in the engine's own environment too."""
    return examine(config, shell, refuse=False, platform=PLATFORMS[job.hardware.vendor])


def plan(
    resolved: ResolvedConfig,
    *,
    with_suggestions: bool = False,
    sources: bool = False,
    as_json: bool = False,
) -> int:
    """Print the plan of a configuration. Returns the exit code: 1 on any violation."""
    made = make_plan(resolved, os.environ)
    lines, data = plan_lines(made, sources=sources), plan_data(made)
    if with_suggestions:
        from lockstep.topology.suggest import suggest

        suggestions = suggest(made.job)
        lines += suggestion_lines([one.text() for one in suggestions])
        data["suggestions"] = [suggestion_data(one) for one in suggestions]
    print(json.dumps(data, indent=2) if as_json else "\n".join(lines))
    return EXIT_FAILED if made.errors else EXIT_DONE


# --- text -------------------------------------------------------------------------------------------------------------


def plan_lines(made: RecipePlan, *, sources: bool = False) -> list[str]:
    """The plan for a terminal."""
    return [
        *headline(made.job),
        *evidence_lines(made),
        *_section("rules", [line for finding in made.rules for line in finding.text().splitlines()], "all kept"),
        *_section("memory", memory_lines(made.memory), "nothing to plan"),
        *_section("environment", ledger_lines(made.ledger), "the recipe sets no variable"),
        *_section("effective configuration", made.arguments.lines(sources=sources), "nothing"),
        *_section("lockstep train", [_refusal(violation) for violation in made.refused_by_train], "runs it"),
        "",
        verdict(made),
    ]


def _section(title: str, lines: Sequence[str], empty: str) -> list[str]:
    return (
        ["", f"{title}: {empty}"] if not lines else ["", f"{title}:", *(f"  {line}" if line else "" for line in lines)]
    )


def _refusal(violation: Violation) -> str:
    return f"refuses {violation.key}: {violation.message}"


def headline(job: Job) -> list[str]:
    """The job in two or three lines."""
    lines = [
        f"{job.name}: {job.model.name} on {_count(job.nodes, 'node')} × {_count(job.gpus_per_node, job.hardware.name)}"
    ]
    if job.train is not None:
        train = job.train
        sizes = {"tp": train.tp, "pp": train.pp, "cp": train.cp, "ep": train.ep, "etp": train.etp or train.tp}
        text = " ".join(f"{name}{size}" for name, size in sizes.items()) if train.backend == "megatron" else ""
        lines.append(f"  trainer: {train.backend} {text}".rstrip() + f", {_count(job.train_world, 'rank')}")
    if job.engine is not None:
        engine = job.engine
        text = "" if engine.engine == "torch" else f" tp{engine.tp} pp{engine.pp} dp{engine.dp} ep{engine.ep}"
        where = "on the trainer's devices" if job.colocated else "on devices of its own"
        lines.append(f"  engine:  {engine.engine}{text}, {_count(engine.gpus_per_engine, 'device')} each, {where}")
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 or what[-1:].isdigit() or what[-1:] == "x" else f"{number} {what}s"


def evidence_lines(made: RecipePlan) -> list[str]:
    """Who has run this layout."""
    known = made.evidence
    if known is None:
        return [] if not needs_evidence(made.resolved.config) else ["  evidence: none: `train` asks for --unverified"]
    state = "" if known.verified else f" Not verified: {known.status or 'its source gives no run on this hardware'}."
    lines = [f"  evidence: {known.evidence.text()}.{state}"]
    if changed := memory_differences(made.job, known):
        lines.append(f"    memory settings that are not its own, whose fit is the plan's word: {'; '.join(changed)}")
    return lines


def memory_lines(memory: MemoryPlan) -> list[str]:
    """Each phase with its largest items, host memory, what is not modelled, findings."""
    lines = [_phase_line(phase, memory.capacity_bytes) for phase in memory.phases]
    if memory.kv_tokens is not None:
        lines.append(f"cache of one engine: {memory.kv_tokens} tokens")
    if memory.host:
        items = ", ".join(f"{item.name} {gigabytes(item.num_bytes)} ({item.basis})" for item in memory.host)
        lines.append(f"host, per node: {gigabytes(memory.host_bytes)} ({items})")
    if lines:
        lines.append(f"margin {memory.margin:.0%}; not modelled: {'; '.join(memory.not_modelled)}")
    return lines + [line for finding in memory.findings for line in finding.text().splitlines()]


def _phase_line(phase: PhasePlan, capacity: int | None) -> str:
    largest = sorted(phase.items, key=lambda item: -item.num_bytes)[:NUM_ITEMS]
    items = ", ".join(f"{item.owner} {item.name} {gigabytes(item.num_bytes)} ({item.basis})" for item in largest)
    where = "" if phase.stage is None else f" stage {phase.stage}"
    of = "" if capacity is None else f" of {gigabytes(capacity)}"
    return f"{phase.phase}{where}: {gigabytes(phase.total_bytes)}{of} a device: {items}"


def ledger_lines(ledger: Ledger) -> list[str]:
    """Each variable with who reads it, then the findings."""
    lines = [
        f"{row.process}: {row.name}={row.effective}  read: {row.read} ({row.reason})"
        for row in ledger.rows
        if row.declared is not None
    ]
    return lines + [line for finding in ledger.findings for line in finding.text().splitlines()]


def verdict(made: RecipePlan) -> str:
    """One line: how many violations and warnings."""
    warnings = sum(finding.severity == "warning" for finding in made.findings)
    tail = f", {_count(warnings, 'warning')}" if warnings else ""
    if made.errors:
        rules = ", ".join(dict.fromkeys(finding.rule for finding in made.errors))
        return f"refused: {_count(len(made.errors), 'violation')} ({rules}){tail}"
    return f"passes{tail}"


# --- data -------------------------------------------------------------------------------------------------------------


def plan_data(made: RecipePlan) -> dict[str, Any]:
    """The plan as one JSON object."""
    phases = [
        {
            "phase": phase.phase,
            "devices": phase.devices,
            "stage": phase.stage,
            "total_bytes": phase.total_bytes,
            "items": [asdict(item) for item in phase.items],
        }
        for phase in made.memory.phases
    ]
    return {
        "name": made.job.name,
        "passes": not made.errors,
        "job": masked_tree(asdict(made.job)),
        "layout": layout_record(made.resolved.config, made.evidence),
        "rules": masked_tree([asdict(finding) for finding in made.rules]),
        "memory": {
            "capacity_bytes": made.memory.capacity_bytes,
            "margin": made.memory.margin,
            "kv_tokens": made.memory.kv_tokens,
            "phases": phases,
            "host": [asdict(item) for item in made.memory.host],
            "not_modelled": list(made.memory.not_modelled),
            "findings": [asdict(finding) for finding in made.memory.findings],
        },
        "environment": made.ledger.as_dict(),
        "arguments": {
            program: [asdict(a) for a in made.arguments.arguments if a.program == program] for program in PROGRAMS
        },
        "unmapped": {one.key: shown(one.value) for one in made.arguments.unmapped},
        "refused_by_train": [violation.text() for violation in made.refused_by_train],
    }


def suggestion_data(one: Suggestion) -> dict[str, Any]:
    """A suggested layout as plain data. ``fits``: 2 with the planner's margin to spare, 1 without, 0 not."""
    layout = {name: value for name, value in asdict(one.layout).items() if name != "switches"}
    known = None if one.known is None else one.known.name
    return {"layout": layout, "peak_bytes": one.peak_bytes, "fits": one.fits, "known_as": known}


def suggestion_lines(texts: Sequence[str]) -> list[str]:
    """Suggestions for a terminal."""
    if not texts:
        return ["", "suggestions: no layout on these devices keeps all rules"]
    return ["", "suggestions, the planner's best first:", *(f"  {text}" for text in texts)]
