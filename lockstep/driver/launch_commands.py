"""``lockstep plan --from run.sh``: another project's launch command, judged like a recipe. Nothing of it is run.

run.sh ──► topology.commandline ──► Job ──┬── layout rules ──┐
                 │                        ├── memory plan ───┼──► verdict, as text or JSON
                 └── findings             └── ledger ────────┘
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config.errors import ConfigError, Violation
from lockstep.driver.launch_unknown import eased
from lockstep.environment.catalogue import Variable
from lockstep.environment.reachability import Platform
from lockstep.topology.commandline import ROWS, Launch, Surroundings, read_launches
from lockstep.topology.launch_models import unknown_shape
from lockstep.topology.launch_repairs import in_flags
from lockstep.topology.memory import plan_memory
from lockstep.topology.memory_records import MemoryPlan, gigabytes
from lockstep.topology.records import Finding, Job

DONE, FAILED = 0, 1
MAX_FILE_BYTES = 1 << 18
_PLATFORMS: dict[str, Platform] = {"nvidia": "cuda", "amd": "rocm", "cpu": "cpu"}
_INTERPRETER = ("PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH", "MASTER_ADDR", "MASTER_PORT", "no_proxy")
_PHASES = {"megatron": ("train", "save"), "vllm": ("generate",), "sglang": ("generate",)}
"""Phases that a launch has; the others have all."""
_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, slots=True)
class LaunchVerdict:
    """One launch command with everything that was found. ``plan`` is None where the model is not known."""

    launch: Launch
    findings: tuple[Finding, ...]
    plan: MemoryPlan | None

    @property
    def legal(self) -> bool:
        """Whether nothing of severity error was found."""
        return all(finding.severity != "error" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """The verdict on a script: each of its launch commands in order."""

    path: str
    verdicts: tuple[LaunchVerdict, ...]

    @property
    def exit_code(self) -> int:
        """0 where no launch has an error, else 1."""
        return DONE if all(verdict.legal for verdict in self.verdicts) else FAILED

    def text(self) -> str:
        """Lines for a terminal."""
        return "\n\n".join(_verdict_text(self.path, verdict) for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """The same for a program; values of variables that are secrets by their name are masked."""
        launches = [_verdict_dict(verdict) for verdict in self.verdicts]
        return {"script": self.path, "legal": self.exit_code == DONE, "launches": launches}


def plan_launch(
    path: str | Path,
    *,
    hardware: str | None = None,
    nodes: int | None = None,
    variables: Sequence[str] = (),
    installed: bool = False,
) -> LaunchReport:
    """The verdict on the launch commands of a script.

    ``hardware`` is a kind of device of the catalogue and ``nodes`` a number of nodes, for what the script does not say
    (``nodes`` wins over the script's); ``variables`` are "NAME=value", which win over the script's own assignments;
    "--flag=value" and "a.b=value" state an option. ``installed`` asks the packages of this machine who reads each
    variable, which takes a minute the first time. Files that the script sources and a local checkpoint's config.json
    are read. Raises ConfigError for a script that can't be read, an unknown device, or a malformed variable.
    """
    from lockstep.topology.catalogue import hardware as device

    script = Path(path)
    surroundings = Surroundings(
        variables=_stated(variables),
        hardware=device(hardware) if hardware else None,
        nodes=nodes,
        script=str(path),
        directory=str(script.parent),
        load=_load,
        read_config=_read_config,
    )
    launches = read_launches(_script_text(script), surroundings)
    return LaunchReport(str(path), tuple(judge_launch(launch, installed=installed) for launch in launches))


def judge_launch(launch: Launch, *, installed: bool = False) -> LaunchVerdict:
    """A launch with the findings of the layout rules, the memory planner and the environment ledger; errors first."""
    found = list(launch.findings)
    plan: MemoryPlan | None = None
    if launch.job is not None:
        try:
            ruled = [f for f in _layout_findings(launch.job, launch.model_known) if not _beside_the_point(f, launch)]
            countable = launch.model_known and all(finding.rule != "sizes-positive" for finding in ruled)
            plan = _judged(launch, plan_memory(launch.job)) if countable else None
        except (ArithmeticError, LookupError, ValueError) as error:
            # A script may state any numbers together, also such as no rule of ours was written for.
            ruled = [Finding("not-judged", "error", f"these numbers together can't be judged: {error}")]
        split = any(finding.rule.startswith("pipeline-") for finding in ruled)
        planned = plan.findings if plan else ()
        judged = [*ruled, *(finding for finding in planned if not (split and finding.rule == "memory-split"))]
        found += eased(judged, launch.job, launch.unknown, launch.unplanned)
        rows = ROWS[launch.project]
        apart = not launch.job.colocated and launch.job.train is not None
        found = [
            finding if apart and _of_all_devices(finding) else in_flags(finding, launch.project, rows, launch.origins)
            for finding in found
        ]
    found += _environment_findings(launch, installed)
    return LaunchVerdict(launch, tuple(sorted(found, key=lambda finding: _ORDER[finding.severity])), plan)


def _of_all_devices(finding: Finding) -> bool:
    """Whether a repair is of the nodes of trainer and engines together, which no option counts where they are apart."""
    return any(path in ("nodes", "gpus_per_node") for path, _ in finding.changes)


def _beside_the_point(finding: Finding, launch: Launch) -> bool:
    """Padding of a vocabulary by the default divisor, where the file with the model's own flags is not here: it may
    state another."""
    unsized = launch.project == "miles" and not {"model.vocab", "train.vocab_divisor"} & set(launch.settings)
    return finding.rule == "vocabulary-padding" and unsized


def _judged(launch: Launch, plan: MemoryPlan) -> MemoryPlan:
    """The plan without what a launch has not: a rollout in pre-training, a refit of a server, a device nobody named."""
    phases = tuple(p for p in plan.phases if p.phase in _PHASES.get(launch.project, (p.phase,)))
    unstated, serves = plan.capacity_bytes is None, launch.project in ("vllm", "sglang")
    findings = tuple(
        finding
        for finding in plan.findings
        if not (unstated and finding.rule == "engine-memory")
        and not (serves and finding.rule == "memory-fits" and finding.message.startswith("refit"))
    )
    return replace(plan, phases=phases, findings=findings)


def _layout_findings(job: Job, model_known: bool) -> list[Finding]:
    """What the layout rules find. Of a model that is not known, only what two quite different models have in common:
    that is what does not depend on it."""
    from lockstep.topology.layout import check_layout

    if model_known:
        return check_layout(job)
    small = unknown_shape(1024 if job.model.is_moe else 0)
    divisible = 1 << 14
    large = replace(
        small,
        num_layers=48,
        hidden=divisible,
        vocab=divisible,
        num_heads=1024,
        num_kv_heads=1024,
        head_dim=128,
        ffn=divisible,
        moe_ffn=divisible if small.num_experts else 0,
        dense_layers=1,
        num_experts=small.num_experts * 3 * 5 * 7 * 11 * 13,
        experts_per_token=8 if small.num_experts else 0,
    )
    also = {(finding.rule, finding.message) for finding in check_layout(replace(job, model=large))}
    return [f for f in check_layout(replace(job, model=small)) if (f.rule, f.message) in also]


def _environment_findings(launch: Launch, installed: bool) -> list[Finding]:
    """The ledger's judgement of the variables that the script sets: by the catalogue's types, values, requirements and
    history, and, with ``installed``, by the source of the packages that are here. A script gives one environment to all
    processes, so that a variable of the other process is no fault of it."""
    from lockstep.environment.catalogue import variables
    from lockstep.environment.ledger import judge

    vendor = launch.job.hardware.vendor if launch.job and launch.job.hardware.memory_bytes else None
    ledger = judge(launch.environment, {}, packages=None if installed else {}, platform=_PLATFORMS.get(vendor or ""))
    merged: dict[tuple[str, str], Finding] = {}
    unknown: list[str] = []
    for finding in ledger.findings:
        if finding.rule == "variable-process":
            continue
        if finding.rule == "variable-unknown":
            unknown += [finding.name] if finding.name not in (*unknown, *_INTERPRETER) else []
            continue
        record = Finding(finding.rule, finding.severity, finding.message, finding.repair, finding.source)
        merged.setdefault((finding.rule, finding.message), record)
    for name in sorted({name for table in launch.environment.values() for name in table}):
        known = variables().get(name)
        if known is not None and known.history and not installed:
            merged["variable-history", name] = _history(known)
    if unknown:
        message = f"no package is known to read {', '.join(sorted(unknown))}"
        merged["variable-unknown", message] = Finding("variable-unknown", "note", message)
    return list(merged.values())


def _history(variable: Variable) -> Finding:
    """What its versions did with a variable: a warning where one of them has removed it."""
    removed = any("is removed" in event for event in variable.history)
    message = f"{variable.name}: what it does depends on {variable.reader}'s version: {'; '.join(variable.history)}"
    repair = f"drop it where {variable.reader} no longer has it" if removed else ""
    return Finding("variable-history", "warning" if removed else "note", message, repair, variable.source)


def _stated(variables: Sequence[str]) -> dict[str, str]:
    stated: dict[str, str] = {}
    for item in variables:
        name, equals, value = item.partition("=")
        if not equals or not name or any(char.isspace() for char in name):
            problem = Violation("--set-variable", f"{item!r} states nothing", "write NAME=value")
            raise ConfigError("plan --from", [problem])
        stated[name] = value
    return stated


def _script_text(path: Path) -> str:
    """The script's text; raises ConfigError with what to do."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            problem = Violation(str(path), f"more than {MAX_FILE_BYTES} bytes", "cut it to the launch command")
            raise ConfigError(str(path), [problem])
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(str(path), [Violation(str(path), "is no text in UTF-8", "name a shell script")]) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(str(path), [Violation(str(path), f"can't be read: {reason}", "name a script")]) from None


def _load(path: str) -> str | None:
    """A sourced file, None where it is not here or is no plain text of reasonable size."""
    file = Path(path)
    try:
        if file.is_file() and file.stat().st_size <= MAX_FILE_BYTES:
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return None


def _read_config(path: str) -> Mapping[str, Any] | None:
    """A local checkpoint's config.json, None where there is none."""
    text = _load(str(Path(path) / "config.json")) if "\0" not in path else None
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = Violation("config.json", f"is no JSON: {error}", "fetch the checkpoint again")
        raise ConfigError(path, [problem]) from None
    return content if isinstance(content, dict) else None


def _verdict_text(path: str, verdict: LaunchVerdict) -> str:
    launch, job = verdict.launch, verdict.launch.job
    lines = [f"{path}:{launch.line}: {launch.project}: {launch.program}"]
    if job is not None:
        model = f"{job.model.name} ({launch.model_origin})" if launch.model_known else "not known"
        lines += [f"  model     {model}", f"  devices   {_devices(job)}", *_layouts(job)]
    lines += [f"  assumed   {text}" for text in launch.assumptions]
    lines += [f"  uncounted {text}" for text in launch.unplanned]
    if verdict.plan is not None and verdict.plan.phases:
        lines.append(f"  memory    {_memory_line(verdict.plan)}")
    if launch.unread:
        lines.append(f"  unread    options that say nothing of layout or memory: {len(launch.unread)}")
    counts = Counter(finding.severity for finding in verdict.findings)
    summary = ", ".join(f"{counts[s]} {s}{'s' if counts[s] > 1 else ''}" for s in _ORDER if counts[s]) or "no findings"
    lines.append(f"  verdict   {'legal' if verdict.legal else 'refused'}: {summary}")
    for finding in verdict.findings:
        lines += ["", *finding.text().splitlines()]
    return "\n".join(lines)


def _devices(job: Job) -> str:
    count = f"{job.nodes} × {job.gpus_per_node} {job.hardware.name}"
    return count if job.colocated or job.train is None else f"{count}, {job.rollout_gpus} of them for rollout"


def _layouts(job: Job) -> list[str]:
    lines: list[str] = []
    if (train := job.train) is not None:
        etp = train.tp if train.etp is None else train.etp
        sizes = f"tp {train.tp} · pp {train.pp} · cp {train.cp} · ep {train.ep} · etp {etp}"
        text = sizes if train.backend == "megatron" else f"replicate {train.replicate or 1} · ulysses {train.ulysses}"
        lines.append(f"  trainer   {train.backend}: {text}")
    if (engine := job.engine) is not None:
        sizes = f"tp {engine.tp} · pp {engine.pp} · dp {engine.dp} · ep {engine.ep}"
        count = f"{engine.gpus_per_engine} GPU{'s' if engine.gpus_per_engine > 1 else ''}"
        lines.append(f"  engine    {engine.engine}: {count} each, {sizes}")
    return lines


def _memory_line(plan: MemoryPlan) -> str:
    phases = " · ".join(f"{phase.phase} {gigabytes(phase.total_bytes)}" for phase in plan.phases)
    capacity = gigabytes(plan.capacity_bytes) if plan.capacity_bytes else "a device that is not stated: give --hardware"
    return f"{phases}; of {capacity}"


def _verdict_dict(verdict: LaunchVerdict) -> dict[str, Any]:
    from lockstep.config.secrets import masked_tree

    launch, job, plan = verdict.launch, verdict.launch.job, verdict.plan
    phases = [
        {"phase": p.phase, "devices": p.devices, "stage": p.stage, "bytes": p.total_bytes}
        for p in (plan.phases if plan else ())
    ]
    return {
        "project": launch.project,
        "program": launch.program,
        "line": launch.line,
        "legal": verdict.legal,
        "model": {"name": job.model.name, "origin": launch.model_origin} if job and launch.model_known else None,
        "devices": {"hardware": job.hardware.name, "nodes": job.nodes, "gpus_per_node": job.gpus_per_node}
        if job
        else None,
        "train": asdict(job.train) if job and job.train else None,
        "engine": asdict(job.engine) if job and job.engine else None,
        "batch": asdict(job.batch) if job and job.batch else None,
        "memory": {"capacity_bytes": plan.capacity_bytes, "phases": phases} if plan else None,
        "environment": masked_tree(launch.environment),
        "findings": masked_tree([asdict(finding) for finding in verdict.findings]),
        "assumptions": list(launch.assumptions),
        "unplanned": list(launch.unplanned),
        "unread": list(launch.unread),
    }
