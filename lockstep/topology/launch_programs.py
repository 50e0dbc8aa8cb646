"""Which of a script's commands start a trainer or an engine, and what their wrappers (torchrun, srun, ray job submit,
env) say of nodes, GPUs and environment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.topology.shell_script import Invocation
from lockstep.topology.shell_values import Unknown, Value

Project = Literal["megatron", "miles", "verl", "vllm", "sglang"]

MARKER = re.compile(
    r"pretrain_\w+\.py|finetune_\w+\.py|train_rl\.py|train(_async)?\.py|\bvllm\b|\bsglang\b|\bverl\.|main_ppo|main_dapo|fully_async_main"
)
"""What a text must contain to be worth reading as a script of its own."""

_MILES_FLAGS = ("--actor-num-", "--rollout-", "--hf-checkpoint", "--prompt-data", "--sglang-", "--colocate")
_MEGATRON = re.compile(r"(pretrain|finetune)_\w+\.py$|train_rl\.py$")
_VERL = re.compile(
    r"(verl|recipe)\.[\w.]*(main_(?!eval|generation)\w+|fully_async_main)$|(main_(ppo|dapo)\w*|fully_async_main)\.py$"
)
_VLLM_SERVER = re.compile(r"vllm\.entrypoints\.(openai\.)?api_server$")
_VLLM_IMAGE = re.compile(r"(^|/)vllm/vllm-openai([:@-]|$)")
"""Images whose entry point is ``vllm serve``'s server: what follows are its options."""
_DEVICES = {
    "gres": re.compile(r"(?:^|,)gpu(?::[\w.-]+)?:(\d+)"),
    "gpus-per-node": re.compile(r"^(?:[\w.-]+:)?(\d+)$"),
}
"""Where Slurm's options count the devices of a node."""
_SHORT = {"-N": "nodes", "-n": "ntasks", "-np": "nproc", "-G": "gpus"}


@dataclass(frozen=True, slots=True)
class Program:
    """A command that starts a trainer or an engine. ``arguments`` are its own words, ``wrapper`` the options of what
    starts it, by name without hyphens in front; ``environment`` what it gets from the script."""

    project: Project
    name: str
    line: int
    arguments: tuple[Value, ...]
    wrapper: Mapping[str, Value]
    environment: Mapping[str, Value]
    submitted: bool = False
    problems: tuple[str, ...] = field(default=())


def find_program(invocation: Invocation) -> Program | None:
    """The program of a command, None where it starts something else."""
    words = invocation.words
    for index, word in enumerate(words):
        found = _program_at(words, index, word.text)
        if found is None:
            continue
        project, name, start = found
        around = (*invocation.outer, *words[:index])
        wrapper, assigned = _wrapper(around)
        environment = {**invocation.environment, **assigned}
        submitted = [w.text for w in around][:3] == ["ray", "job", "submit"]
        problems: list[str] = []
        if "runtime-env-json" in wrapper:
            variables = runtime_environment(wrapper["runtime-env-json"])
            if variables is None:
                problems.append("--runtime-env-json is no JSON object, so its env_vars are not known")
            environment = {**environment, **(variables or {})}
        return Program(project, name, invocation.line, words[start:], wrapper, environment, submitted, tuple(problems))
    return None


def _program_at(words: Sequence[Value], index: int, word: str) -> tuple[Project, str, int] | None:
    """The program that word ``index`` is: (project, name, index of its first argument)."""
    base = word.rpartition("/")[2]
    after = words[index + 1].text if index + 1 < len(words) else ""
    module = index > 0 and words[index - 1].text in ("-m", "--module")
    if base in ("vllm", "sglang") and after == "serve" and not module:
        return ("vllm" if base == "vllm" else "sglang"), f"{base} serve", index + 2
    if _VLLM_IMAGE.search(word) and any(value.text in ("run", "exec") for value in words[:index]):
        return "vllm", word, index + 1
    if module and _VLLM_SERVER.match(word):
        return "vllm", word, index + 1
    if module and word == "sglang.launch_server":
        return "sglang", word, index + 1
    if (module and _VERL.match(word)) or (not module and word.endswith(".py") and _VERL.search(base)):
        return "verl", word, index + 1
    if base in ("train.py", "train_async.py"):
        arguments = [value.text for value in words[index + 1 :]]
        if any(text.startswith(_MILES_FLAGS) for text in arguments):
            return "miles", word, index + 1
    if _MEGATRON.search(base):
        return "megatron", word, index + 1
    return None


def _wrapper(words: Sequence[Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Options by name, and variables that ``env``, ``srun --export`` or a container's ``-e`` assign."""
    options: dict[str, Value] = {}
    assigned: dict[str, Value] = {}
    for index, word in enumerate(words):
        first = word.parts[0] if word.parts and isinstance(word.parts[0], str) else ""
        following = words[index + 1] if index + 1 < len(words) else Value()
        if first in _SHORT:
            options[_SHORT[first]] = following
        elif first.startswith("--"):
            name, equals, _ = first[2:].partition("=")
            name = name.replace("_", "-")
            options[name] = _after(word, len(first.partition("=")[0]) + 1) if equals else following
        elif match := re.match(r"([A-Za-z_]\w*)=", first):
            assigned[match.group(1)] = _after(word, match.end())
    if "export" in options and (known := options["export"].known):
        pairs = [item.partition("=") for item in known.split(",")]
        assigned |= {name: Value((value,)) for name, equals, value in pairs if equals}
    return options, assigned


def scheduler_options(text: str) -> dict[str, Value]:
    """Options of ``#SBATCH`` lines by their long names; devices of a node, however they are asked for, are
    "gpus-per-node"."""
    found: dict[str, Value] = {}
    for line in re.findall(r"^#SBATCH[ \t]+(.*)$", text[: 1 << 16], re.MULTILINE):
        words = re.split(r"\s#", line)[0].split()
        for index, word in enumerate(words):
            option = re.fullmatch(r"--([\w-]+)(?:=(.*))?|(-[A-Za-z])(.*)", word)
            name = option and (option.group(1) or _SHORT.get(option.group(3)))
            if not option or not name:
                continue
            attached = option.group(2) if option.group(1) else option.group(4) or None
            value = attached if attached is not None else next(iter(words[index + 1 : index + 2]), "")
            found[name] = Value((value.strip("\"'"),))
            if name in _DEVICES and (count := _DEVICES[name].search(found[name].text)):
                found["gpus-per-node"] = Value((count.group(1),))
    return found


def _after(word: Value, characters: int) -> Value:
    """The word without its first characters, which are known."""
    first = word.parts[0]
    rest = first[characters:] if isinstance(first, str) else first
    return Value(tuple(part for part in (rest, *word.parts[1:]) if part != ""), word.line)


def runtime_environment(value: Value) -> dict[str, Value] | None:
    """``env_vars`` of Ray's runtime environment; None where the text is no JSON object.

    Pieces that are not known stand for themselves in the values.
    """
    pieces: list[Unknown] = []
    text = ""
    for part in value.parts:
        if isinstance(part, Unknown):
            text += f"\u241f{len(pieces)}\u241f"
            pieces.append(part)
        else:
            text += part
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    variables = content.get("env_vars", {}) if isinstance(content, dict) else None
    if not isinstance(variables, dict):
        return None
    found: dict[str, Value] = {}
    for name, item in variables.items():
        parts: list[str | Unknown] = []
        for position, piece in enumerate(re.split("\u241f([0-9]+)\u241f", str(item))):
            parts.append(pieces[int(piece)] if position % 2 and int(piece) < len(pieces) else piece)
        found[str(name)] = Value(tuple(part for part in parts if part != ""), value.line)
    return found
