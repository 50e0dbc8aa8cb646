"""The effective configuration: what a recipe means as arguments of the programs that others run, each with a source.

    RunConfig ──► the settings in force ──► catalog/engine_args.toml ──► arguments by program, and what has no mapping

Nothing is invented: a setting without an entry in the catalogue, or with a value that the entry does not list, is
*unmapped*. Settings that the chosen trainer or engine does not read are left out: the rules refuse those.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.cluster_checks import ENGINE_LAYOUT_IGNORED, OF_FSDP
from lockstep.config.load import flatten
from lockstep.config.schema import RunConfig
from lockstep.config.toml_text import format_value
from lockstep.topology.catalogue import read_catalogue

PROGRAMS = {
    "megatron": "Megatron-LM",
    "miles": "miles, which drives Megatron",
    "verl": "verl, which drives Megatron",
    "torchrun": "torchrun",
    "fsdp": "torch (FSDP2, AdamW)",
    "vllm": "vLLM",
    "sglang": "SGLang",
}

SECTIONS = ("cluster", "trainer", "rollout", "refit", "algorithm")
"""Sections whose settings are all listed; of the others those that have a mapping."""

OWN = {
    *("cluster.unverified", "trainer.backend", "rollout.engine"),
    *("rollout.process", "rollout.python", "refit.transport", "refit.verify_every", "refit.timeout_s", "refit.folder"),
}
"""Settings that choose the programs, or are Lockstep's own: that another program lacks them says nothing."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One setting as a program's argument: "--tensor-model-parallel-size 4"."""

    program: str
    text: str
    key: str
    source: str


@dataclass(frozen=True, slots=True)
class Unmapped:
    """A setting in force that no entry of the catalogue has a text for."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Effective:
    """The arguments by program, in the order of the catalogue, and the settings without one."""

    arguments: tuple[Argument, ...]
    unmapped: tuple[Unmapped, ...]

    def lines(self, *, sources: bool = False) -> list[str]:
        """For a terminal."""
        lines: list[str] = []
        for program, title in PROGRAMS.items():
            own = [argument for argument in self.arguments if argument.program == program]
            if not own:
                continue
            width = max(len(argument.text) for argument in own) if sources else 0
            lines += ["", f"{title}:"]
            lines += [f"  {a.text:{width}}" + (f"  # {a.key}; {a.source}" if sources else "") for a in own]
        if self.unmapped:
            lines += ["", "unmapped (no sourced argument):"]
            lines += [f"  {one.key} = {shown(one.value)}" for one in self.unmapped]
        return lines[1:]


def effective(config: RunConfig) -> Effective:
    """The arguments that ``config`` means for its trainer, the program that drives it, and its engine."""
    catalogue = read_catalogue("engine_args")
    programs = programs_of(config)
    settings = dict(settings_in_force(config))
    arguments: list[Argument] = []
    mapped: set[str] = set()
    for program in programs:
        for key, entry in catalogue[program].items():
            text = argument_text(entry, settings[key], config) if key in settings else None
            if text is not None:
                mapped.add(key)
            if text:
                arguments.append(Argument(program, text, key, entry["source"]))
    arguments += engine_arguments(config)
    defaults = _defaults()
    unmapped = [
        Unmapped(key, value)
        for key, value in settings.items()
        if key not in mapped | OWN
        and key.partition(".")[0] in SECTIONS
        and not key.startswith(("rollout.sglang.engine_args", "rollout.vllm.engine_args"))
        and value != defaults.get(key)
    ]
    return Effective(tuple(arguments), tuple(unmapped))


def programs_of(config: RunConfig) -> list[str]:
    """The programs whose arguments a configuration means."""
    if config.trainer.backend == "megatron":
        drives = "verl" if config.trainer.megatron.implementation == "verl" else "miles"
        programs = ["megatron", drives]
    else:
        programs = ["torchrun", "fsdp"]
    return programs + ([] if config.rollout.engine == "torch" else [config.rollout.engine])


def settings_in_force(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every setting that the chosen trainer and engine read, by its dotted key."""
    engine = config.rollout.engine
    ignored = {f"rollout.layout.{name}" for name in ENGINE_LAYOUT_IGNORED.get(engine, ())}
    megatron = config.trainer.backend == "megatron"
    for key, value in flatten(config).items():
        other_engine = key.startswith(tuple(f"rollout.{name}." for name in ("vllm", "sglang") if name != engine))
        of_layout = key.startswith("trainer.layout.")
        of_fsdp = key.removeprefix("trainer.layout.") in OF_FSDP
        if (
            other_engine
            or key in ignored
            or (engine == "torch" and key.startswith("rollout.layout."))
            or (engine != "torch" and key == "rollout.fast_path")
            or (of_layout and of_fsdp == megatron)
            or (not megatron and key.startswith("trainer.megatron."))
            or (megatron and key == "trainer.gradient_checkpointing")
        ):
            continue
        yield key, value


def argument_text(entry: Mapping[str, Any], value: Any, config: RunConfig) -> str | None:
    """The text of a setting by its catalogue entry: empty where the program's default says it, None where the entry has
    no text for the value."""
    if value is None or value == [] or value in entry.get("omit", ()):
        return ""
    if "form" in entry:
        value = FORMS[entry["form"]](config, value)
        if value is None:
            return ""
    if "values" in entry:
        return entry["values"].get(str(value))
    if "switch" in entry:
        return entry["switch"] if value else entry.get("off", "")
    if "text" in entry:
        return entry["text"].replace("{value}", str(value))
    if "assign" in entry:
        return f"{entry['assign']}={value}"
    return f"{entry['flag']} {value}"


def engine_arguments(config: RunConfig) -> list[Argument]:
    """The free arguments of the chosen engine, under the names that its own argument record gives them."""
    engine = config.rollout.engine
    given = {"sglang": config.rollout.sglang.engine_args, "vllm": config.rollout.vllm.engine_args}.get(engine, {})
    key = f"rollout.{engine}.engine_args"
    return [
        Argument(engine, f"--{name.replace('_', '-')}{_free_value(value)}", f"{key}.{name}", f"{key}: passed as given")
        for name, value in given.items()
        if value is not False
    ]


def _free_value(value: Any) -> str:
    if isinstance(value, dict | list):
        return f" {shlex.quote(json.dumps(value))}"
    return "" if value is True else f" {shown(value)}"


def shown(value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else format_value(value)


def _defaults() -> dict[str, Any]:
    """The schema's defaults of every section that has one."""
    found: dict[str, Any] = {}
    for name in SECTIONS:
        section = RunConfig.model_fields[name].default
        found |= _flat(section.model_dump(mode="json"), name)
    return found


def _flat(node: Any, path: str) -> dict[str, Any]:
    if not isinstance(node, dict) or not node:
        return {path: node}
    return {key: value for name, below in node.items() for key, value in _flat(below, f"{path}.{name}").items()}


# --- forms ------------------------------------------------------------------------------------------------------------


def _pipeline_layout(config: RunConfig, stages: Any) -> str:
    """Megatron's layout string: "Et*6|t*6|t*5L"."""
    middle = "|".join(f"t*{layers}" for layers in stages)
    return f'"E{middle}L"'


def _train_devices(config: RunConfig) -> tuple[int, int]:
    """Nodes of the trainer and its devices on each: all of them, or what engines of their own leave, as evenly spread
    as it goes."""
    cluster = config.cluster
    world = cluster.nodes * cluster.gpus_per_node - cluster.rollout_gpus
    each = max(size for size in range(1, cluster.gpus_per_node + 1) if world % size == 0)
    return world // each, each


def _token_budget(config: RunConfig, tokens: Any) -> str | None:
    """miles reads the budget with dynamic batches alone, which padded rows can't have and a number of samples rules
    out."""
    if config.trainer.packing in ("padded", "single"):
        return f"--max-tokens-per-gpu {tokens}"
    fixed = config.trainer.megatron.micro_batch is not None
    return None if fixed else f"--use-dynamic-batch-size --max-tokens-per-gpu {tokens}"


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}

FORMS: Mapping[str, Callable[[RunConfig, Any], Any]] = {
    "pipeline_layout": _pipeline_layout,
    "train_nodes": lambda config, _: _train_devices(config)[0],
    "train_gpus_per_node": lambda config, _: _train_devices(config)[1],
    "node_of_trainer_and_engines": lambda config, devices: (
        f"--actor-num-gpus-per-node {_train_devices(config)[1]} --num-gpus-per-node {devices}"
    ),
    "token_budget": _token_budget,
    "prompts_per_step": lambda config, steps: config.algorithm.num_prompts // steps,
    "megabytes": lambda config, value: value >> 20,
    "short": lambda config, value: _SHORT[value],
    "advantage": lambda config, value: "gspo" if config.algorithm.loss == "gspo" else value,
    "with_kl": lambda config, value: None if config.algorithm.kl.place == "off" else value,
    "with_tis": lambda config, value: None if config.algorithm.corrections.weight == "off" else value,
}
"""How a catalogue entry writes its value, where that is not the value itself; None: there is no argument."""
