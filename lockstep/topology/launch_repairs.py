"""A repair of a job in the words of its launch command: "ep 4 → 2" as ``--expert-model-parallel-size 2``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.topology.launch_flags import Row
from lockstep.topology.launch_options import Option
from lockstep.topology.records import Finding

_TARGETS = {"nodes": "job.nodes", "gpus_per_node": "job.gpus_per_node", "rollout_gpus": "launch.rollout_gpus"}
_SPECIAL: dict[str, dict[str, str]] = {
    "megatron": {"job.nodes": "torchrun --nnodes {}", "job.gpus_per_node": "torchrun --nproc-per-node {}"},
    "miles": {"job.nodes": "--actor-num-nodes {}", "job.gpus_per_node": "--actor-num-gpus-per-node {}"},
}
_DERIVED = {
    "miles": ("engine.tp",),
    "verl": ("engine.gpus_per_engine",),
    "vllm": ("engine.gpus_per_engine", "gpus_per_node"),
    "sglang": ("engine.gpus_per_engine", "gpus_per_node"),
}
_OFFLOAD = "memory.optimizer_offload_fraction"


def in_flags(finding: Finding, project: str, rows: Mapping[str, Row], origins: Mapping[str, Option]) -> Finding:
    """The finding with its first repair spelled as options of the command, where each of its settings has one.

    ``origins`` are the options that were given, by target.
    """
    pieces = [_piece(path, value, project, rows, origins) for path, value in finding.changes]
    if not pieces or None in pieces:
        return finding
    spelled = "; ".join(piece for piece in pieces if piece)
    if not spelled:
        return finding
    return replace(finding, repair=f"{finding.repair} — {spelled}" if finding.repair else spelled)


def _piece(path: str, value: Any, project: str, rows: Mapping[str, Row], origins: Mapping[str, Option]) -> str | None:
    if path in _DERIVED.get(project, ()):
        return ""
    if project == "vllm" and path == "engine.ep":
        return _expert_switch(value, "launch.expert_parallel" in origins)
    target = _TARGETS.get(path, path if "." in path else f"job.{path}")
    if target == _OFFLOAD and project in ("megatron", "miles"):
        return f"add --optimizer-cpu-offload --optimizer-offload-fraction {value:g}" if value else None
    if project == "megatron" and target == "batch.num_prompts" and target not in origins:
        return ""  # pre-training has no prompts: its samples are those of the global batch
    if project == "verl" and target == "batch.global_batch":
        return ""  # prompts of a mini-batch · samples of each: the repair's number is of samples
    if target in _SPECIAL.get(project, {}):
        return _SPECIAL[project][target].format(value)
    given = origins.get(target)
    flags = [flag for flag, row in rows.items() if row.target == target]
    if not flags:
        return None
    flag = given.flag if given is not None else _fitting(flags, value, rows)
    if flag is None:
        return None
    where = f" on line {given.line}" if given is not None and given.line else ""
    if value is None or (value is False and project != "verl") or value == ():
        return f"drop {flag}{where}" if given is not None else None
    row = rows.get(flag) or rows[flags[0]]
    if row.convert is None:
        return f"add {flag}"
    if isinstance(value, bool) and project != "verl":
        return None
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{flag}{'=' if project == 'verl' else ' '}{shown}{where}"


def _expert_switch(size: int, given: bool) -> str:
    """vLLM's experts go over all ranks of an engine, or over none."""
    if size == 1:
        return "drop --enable-expert-parallel"
    return "" if given else "add --enable-expert-parallel"


def _fitting(flags: list[str], value: Any, rows: Mapping[str, Row]) -> str | None:
    """The flag of a setting that can express the value: a switch only its own."""
    return next((flag for flag in flags if rows[flag].convert is not None or rows[flag].present == value), None)
