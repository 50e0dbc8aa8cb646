"""Launch commands of other projects as jobs: Megatron, miles and slime, verl, vLLM, SGLang.

    run.sh ──► shell_script.follow ──► launch_programs.find_program ──► launch_options (flags_*.py)
                 (nothing is run)        torchrun, ray job submit, …          │
                                                                              ▼
               findings ◄── launch_rules (inert, contradictory)  ◄── launch_models + launch_jobs ──► Job

What can't be known without running the script is a finding with its line and the way to state it; the job is built
without it. `lockstep.driver.launch_commands` adds the verdict of the layout rules, the planner and the ledger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.secrets import masked, masked_command
from lockstep.topology import flags_megatron, flags_miles, flags_sglang, flags_verl, flags_vllm
from lockstep.topology.launch_flags import lookup
from lockstep.topology.launch_jobs import NODES_ASSUMED, Cluster, build_job, defaults_of
from lockstep.topology.launch_models import KnownModel, catalogue_name, identify
from lockstep.topology.launch_options import Option, Options, read_flags, read_overrides
from lockstep.topology.launch_programs import MARKER, Program, find_program, scheduler_options
from lockstep.topology.launch_rules import (
    ENGINE_VARIABLES,
    command_findings,
    environment_findings,
    schedule_findings,
    unplanned,
    visible_devices,
)
from lockstep.topology.records import Finding, Hardware, Job
from lockstep.topology.shell_script import Script, follow
from lockstep.topology.shell_syntax import ShellError
from lockstep.topology.shell_values import Unknown, Value

PROCESSES = ("trainer", "engine")
ROWS = {
    "megatron": flags_megatron.TRAINER,
    "miles": flags_miles.TRAIN,
    "verl": flags_verl.KEYS,
    "vllm": flags_vllm.SERVER,
    "sglang": flags_sglang.SERVER,
}
"""The table of each project: what its options mean."""

_MODEL_FLAGS = ("--hf-checkpoint", "--model-path", "--model", "actor_rollout_ref.model.path")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch command that was read.

    ``job`` is None where its numbers make none; ``model_known`` False: only rules that read nothing of the model may
    judge it. ``environment`` is what the script gives to each process; ``origins`` the option of each setting;
    ``unread`` flags that exist but say nothing of layout or memory; ``findings`` what is wrong with the command
    itself; ``assumptions`` what was filled in; ``unknown`` the settings that the command gives and nobody here knows,
    "nodes" where their number is assumed; ``unplanned`` options whose effect on memory is not counted.
    """

    project: str
    program: str
    line: int
    job: Job | None
    model_known: bool
    model_origin: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Mapping[str, str]]
    origins: Mapping[str, Option] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    assumptions: tuple[str, ...] = ()
    unknown: frozenset[str] = frozenset()
    unplanned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a script does not hold: the user's values for variables and flags, devices, and a way to read files beside
    it (a sourced script's text by path, a checkpoint's config.json by folder); by default nothing is read."""

    variables: Mapping[str, str] = field(default_factory=dict)
    hardware: Hardware | None = None
    nodes: int | None = None
    script: str | None = None
    directory: str | None = None
    load: Callable[[str], str | None] | None = None
    read_config: Callable[[str], Mapping[str, Any] | None] | None = None


def read_launch(text: str, surroundings: Surroundings | None = None) -> Launch:
    """The first trainer that a script starts, or its first engine. Raises ConfigError as `read_launches`."""
    launches = read_launches(text, surroundings)
    return next((launch for launch in launches if launch.project not in ("vllm", "sglang")), launches[0])


def read_launches(text: str, surroundings: Surroundings | None = None) -> tuple[Launch, ...]:
    """Every trainer and engine that a script starts, in order.

    Raises ConfigError where the text can't be read as a shell script (with the line), is beyond the reader's bounds,
    or starts none of the programs that are known here.
    """
    around = surroundings or Surroundings()
    name = around.script or "the script"
    variables = {key: value for key, value in around.variables.items() if re.fullmatch(r"\w+", key)}
    schedule = scheduler_options(text)
    nodes = schedule.get("nodes", Value()).text
    slurm = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes} if nodes.isdecimal() else {}
    try:
        script = follow(
            text,
            given={**slurm, **variables},
            marker=MARKER,
            load=around.load,
            script=around.script,
            directory=around.directory,
        )
    except ShellError as error:
        way_out = "bash -n finds errors of syntax; a script beyond the bounds has to be cut to its launch command"
        raise ConfigError(name, [Violation(f"{name}:{error.line}", str(error), way_out)]) from None
    programs = [program for invocation in script.invocations if (program := find_program(invocation))]
    if not programs:
        raise ConfigError(name, [_nothing_found(name, script)])
    return tuple(_read(program, script, schedule, around) for program in _distinct(programs))


def _nothing_found(name: str, script: Script) -> Violation:
    sourced = "".join(f"; line {line} sources {path}, which is not here" for path, line in script.missing[:3])
    return Violation(
        name,
        f"no launch command was found among {len(script.invocations)} commands{sourced}",
        "a script is read for torchrun pretrain_*.py (Megatron), train.py with rollout flags (miles, slime), "
        "python -m verl.trainer.main_ppo, vllm serve and python -m sglang.launch_server",
    )


def _distinct(programs: Sequence[Program]) -> list[Program]:
    """Programs without repetitions: a loop over hosts starts the same one again and again."""
    seen: dict[tuple[str, int, str], Program] = {}
    for program in programs:
        key = (program.name, program.line, " ".join(value.text for value in program.arguments))
        seen.setdefault(key, program)
    return list(seen.values())[:16]


def _read(program: Program, script: Script, schedule: Mapping[str, Value], around: Surroundings) -> Launch:
    program = replace(program, wrapper={**schedule, **program.wrapper})
    options = _options(program, around.variables)
    findings = [*_unsettled(options, script), *options.findings, *_detached(script)]
    findings += schedule_findings(program, nodes_stated=around.nodes is not None)
    settings = {**defaults_of(program), **options.settings}
    if program.project == "verl":
        findings += _verl_config(settings, options)
    model, problem = _model(options, settings, script, around)
    findings += list(problem)
    environment, unclear = _environment(program, options)
    findings += unclear
    job: Job | None = None
    assumptions: tuple[str, ...] = model.assumptions if model else ()
    counted = _devices_shown(options, settings, environment)
    try:
        built = build_job(program, settings, model, Cluster(around.hardware, around.nodes), environment)
        job, assumptions = built.job, (*assumptions, *counted, *built.assumptions)
    except (ValueError, ZeroDivisionError, TypeError) as error:
        findings.append(Finding("no-job", "error", f"the command's numbers make no job: {error}"))
    findings += command_findings(program, options, settings, job)
    findings += _exports(program, script)
    return Launch(
        project=program.project,
        program=program.name,
        line=program.line,
        job=job,
        model_known=model is not None,
        model_origin=model.origin if model else "",
        settings=settings,
        environment=environment,
        origins=options.origins,
        unread=tuple(options.unread),
        findings=tuple(_eased(findings, model is not None)),
        assumptions=assumptions,
        unknown=_unknown(options, program, assumptions, around),
        unplanned=unplanned(options, program.project),
    )


def _unknown(options: Options, program: Program, assumptions: Sequence[str], around: Surroundings) -> frozenset[str]:
    """See ``Launch.unknown``."""
    rows = lookup(ROWS[program.project])
    found = {rows[flag].target for flag in options.unsettled if flag in rows}
    if around.nodes is None and (found & {"job.nodes", "launch.actor_nodes"} or NODES_ASSUMED in assumptions):
        found.add("nodes")
    if found & {"launch.rollout_gpus", "launch.rollout_nodes", "launch.rollout_gpus_per_node"}:
        found.add("rollout_gpus")
    if any("--runtime-env-json" in problem for problem in program.problems):
        found.add("environment")
    return frozenset(found)


def _options(program: Program, given: Mapping[str, str]) -> Options:
    if program.project == "verl":
        return read_overrides(program.arguments, flags_verl.KEYS, given)
    words = list(program.arguments)
    rows = ROWS[program.project]
    options = read_flags(words, rows, program.project, given, underscores=program.project == "vllm")
    if program.project == "vllm" and options.positional and "launch.model" not in options.settings:
        name = options.positional[0]
        options.settings["launch.model"] = name.text
    return options


_STRATEGY = "actor_rollout_ref.actor.strategy"
_OWN_ENGINES = ("dp", "fsdp", "fsdp2", "megatron")


def _verl_config(settings: dict[str, Any], options: Options) -> list[Finding]:
    """``strategy``, ``model_engine=megatron`` or ``--config-name=ppo_megatron_trainer`` choose the trainer. One that is
    not known here is a finding: then the engine alone is judged."""
    named = options.by_flag.get("--config-name")
    configuration = named.values[0].text if named and named.values else ""
    chosen = options.by_flag.get(_STRATEGY) or options.by_flag.get("model_engine")
    engine = chosen.values[0].known if chosen and chosen.values else None
    if engine is not None and chosen is not None and engine not in _OWN_ENGINES:
        settings["launch.foreign"] = engine
        message = f"line {chosen.line}: {chosen.text}: a trainer that is not known here, so the engine alone is judged"
        return [Finding("trainer-unknown", "warning", message, source="verl verl/trainer/config/model_engine")]
    if engine == "megatron" or (engine is None and "megatron" in configuration):
        settings.setdefault("train.backend", "megatron")
    return []


def _unsettled(options: Options, script: Script) -> list[Finding]:
    """What is not known statically, with the way to state it."""
    found: list[Finding] = []
    for option in options.unsettled.values():
        if option.flag in _MODEL_FLAGS:
            options.settings.setdefault("launch.model", option.values[0].text)
        unknown = next(piece for value in option.values for piece in value.unknowns)
        reason = f" ({unknown.reason})" if unknown.reason else ""
        message = f"line {option.line}: {option.text[:200]}: not known{reason}, so judged without it"
        found.append(Finding("not-known", "warning", message, f"give --set-variable {_statement(unknown, option)}"))
    for unknown in options.opaque:
        source = next((path for path, _ in script.missing), None)
        sourced = f"; it may come from {source}, which is not here" if source else ""
        reason = f"{unknown.reason}{sourced}" if unknown.reason else "only a running shell knows it"
        message = f"line {unknown.line}: {unknown.source}: any number of options that are not known ({reason})"
        repair = f"give --set-variable '{unknown.variable}=…'" if unknown.variable else "write the options out"
        found.append(Finding("not-known", "warning", message, repair))
    return found


def _eased(findings: list[Finding], model_known: bool) -> list[Finding]:
    """What is not known of a model that is known all the same is a note: its checkpoint's folder, its sizes."""
    of_model = re.compile(r": (?:(?:" + "|".join(map(re.escape, _MODEL_FLAGS)) + r") |\$\{?\w*MODEL)|model_args")
    return [
        replace(finding, severity="note")
        if model_known and finding.rule == "not-known" and of_model.search(finding.message)
        else finding
        for finding in findings
    ]


def _statement(unknown: Unknown, option: Option) -> str:
    return f"{unknown.variable}=…" if unknown.variable else f"'{option.flag}=…'"


def _detached(script: Script) -> list[Finding]:
    return [
        Finding(
            "flags-detached",
            "error",
            f"line {line}: {masked_command(text)[:120]} begins a command of its own: the one above ended before it, "
            "so that it never gets these options",
            "end every line of the command with \\, and put no comment or empty line between them",
            "POSIX Shell Command Language 2.3: a comment goes to the end of its line, backslash included",
        )
        for line, text in script.detached
    ]


def _model(
    options: Options, settings: dict[str, Any], script: Script, around: Surroundings
) -> tuple[KnownModel | None, tuple[Finding, ...]]:
    sizes = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    path = str(settings.get("launch.model", ""))
    try:
        model = identify(path, sizes, settings, around.read_config) or _hinted(options, sizes, settings, script)
    except ConfigError as error:
        problems = "; ".join(violation.message for violation in error.violations)
        return None, (Finding("model-unknown", "warning", f"{error.subject[:120]} is not read: {problems}"),)
    if model is not None:
        return model, model.findings
    named = f"{path[:120]!r} is no model of the catalogue" if path else "the command names no checkpoint"
    sized = "" if sizes else " and gives no sizes"
    repair = "state the folder of a checkpoint with its config.json, or Megatron's --num-layers, --hidden-size, …"
    message = f"{named}{sized}: rules that need the model, and memory, are not judged"
    return None, (Finding("model-unknown", "warning", message, repair),)


def _hinted(
    options: Options, sizes: Mapping[str, Any], settings: Mapping[str, Any], script: Script
) -> KnownModel | None:
    """The model by the name of a sourced file of sizes, or of one that a command would have printed."""
    hints = [path for path, _ in script.missing]
    hints += [name for unknown in options.opaque for name in re.findall(r"[\w.-]+", unknown.source)[:40]]
    for hint in hints:
        if (name := catalogue_name(hint)) is not None:
            return identify(name, sizes, settings, None)
    return None


def _environment(program: Program, options: Options) -> tuple[dict[str, dict[str, str]], list[Finding]]:
    """Known variables by process; a note for those that are not."""
    processes = {"megatron": ("trainer",), "vllm": ("engine",), "sglang": ("engine",)}.get(program.project, PROCESSES)
    known = {name: value.known for name, value in program.environment.items() if value.known is not None}
    findings = [
        Finding("not-known", "note", f"{name}={masked(name, value.text[:80])}: the variable's value is not known")
        for name, value in program.environment.items()
        if value.known is None and ENGINE_VARIABLES.match(name)
    ]
    findings += [Finding("not-known", "warning", f"line {program.line}: {problem}") for problem in program.problems]
    environment = {process: {k: v for k, v in known.items() if v is not None} for process in processes}
    if program.project == "verl":
        for flag, option in options.by_flag.items():
            match = re.search(r"runtime_env\.env_vars\.(\w+)$", flag)
            if match and option.values and option.values[0].known is not None:
                for process in processes:
                    environment[process][match.group(1)] = option.values[0].known
    if isinstance(extra := options.settings.get("launch.train_environment"), str):
        environment["trainer"] |= _train_variables(extra)
    return environment, findings


def _train_variables(text: str) -> dict[str, str]:
    """``--train-env-vars``: a JSON object for the trainer alone (miles/utils/arguments.py)."""
    import json

    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in content.items()} if isinstance(content, dict) else {}


def _devices_shown(
    options: Options, settings: dict[str, Any], environment: Mapping[str, Mapping[str, str]]
) -> tuple[str, ...]:
    """GPUs a node where the command's own number is not known: as many as the script shows, else the default."""
    tables = [lookup(ROWS[project]) for project in ("miles", "verl")]
    unsettled = {table[flag].target for flag in options.unsettled for table in tables if flag in table}
    for target in sorted(unsettled & {"launch.actor_gpus_per_node", "job.gpus_per_node"}):
        shown = [visible_devices(table) for table in environment.values()]
        devices = next((found for lists in shown for found in lists.values()), None)
        settings[target] = len(devices) if devices else 8
        reason = "as many as the script shows to its processes" if devices else "the default, as it is not known"
        return (f"{settings[target]} GPUs a node: {reason}",)
    return ()


def _exports(program: Program, script: Script) -> list[Finding]:
    own = next((i for i in script.invocations if i.line == program.line), None)
    if own is None:
        return []
    exported = {name: value.text for name, value in own.environment.items()}
    starts = [i for i in script.invocations if [word.known for word in i.words[:2]] == ["ray", "start"]]
    seen = {name for start in starts for name in start.environment}
    lost = {name: text for name, text in exported.items() if name not in seen}
    return environment_findings(program, lost, reaches_workers=False)
