"""Options of a launch command that have no effect or contradict each other, and variables that never reach a process.

The layout rules judge the job; these judge the command: what its program would silently drop, override or never see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.secrets import masked
from lockstep.topology.launch_options import Options
from lockstep.topology.launch_programs import Program, Project
from lockstep.topology.records import Finding, Job

_ARGUMENTS = "Megatron-LM megatron/training/arguments.py: validate_args"
_MILES = "miles miles/utils/arguments.py"
ENGINE_VARIABLES = re.compile(
    r"(NCCL|RCCL|CUDA|HIP|HSA|ROCR|NVTE|SGLANG|SGL|VLLM|AITER|TORCH|PYTORCH|MEGATRON|NVSHMEM|UCX|GLOO|TRITON|FLASHINFER)_"
)


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule of this file sees: the options as given, and the job where there is one."""

    options: Options
    settings: Mapping[str, Any]
    job: Job | None

    def given(self, flag: str) -> bool:
        """Whether the command has this flag."""
        return flag in self.options.by_flag

    def line(self, flag: str) -> int:
        """The line of a flag."""
        return self.options.by_flag[flag].line


@dataclass(frozen=True, slots=True)
class Inert:
    """A flag without effect. ``when`` holds where it has none; ``because`` and ``repair`` are told to the user.
    ``refused``: the program stops with an error instead."""

    flags: tuple[str, ...]
    projects: tuple[Project, ...]
    when: Callable[[Context], bool]
    because: str
    repair: str
    source: str
    refused: bool = False


def _setting(name: str) -> Callable[[Context], bool]:
    return lambda context: bool(context.settings.get(name))


def _without(name: str) -> Callable[[Context], bool]:
    return lambda context: not context.settings.get(name)


_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_TRAINERS: tuple[Project, ...] = ("megatron", "miles")
_V = "actor_rollout_ref.actor."

INERT: tuple[Inert, ...] = (
    Inert(
        ("--optimizer-offload-fraction", "--overlap-cpu-optimizer-d2h-h2d"),
        _TRAINERS,
        _without("launch.optimizer_offload"),
        "the optimizer is not offloaded without --optimizer-cpu-offload",
        "add --optimizer-cpu-offload --use-precision-aware-optimizer",
        "Megatron-LM megatron/core/optimizer/__init__.py: get_megatron_optimizer",
    ),
    Inert(
        ("--fp8-recipe", "--fp8-param-gather"),
        _TRAINERS,
        _without("launch.fp8_format"),
        "training is not in fp8 without --fp8-format",
        "add --fp8-format e4m3",
        "Megatron-LM megatron/core/fp8_utils.py: get_fp8_context",
    ),
    Inert(
        ("--moe-flex-dispatcher-backend",),
        _TRAINERS,
        lambda context: context.settings.get("train.moe_dispatcher") != "flex",
        "only the flex dispatcher has back ends",
        "add --moe-token-dispatcher-type flex",
        "Megatron-LM megatron/core/transformer/moe/token_dispatcher.py: MoEFlexTokenDispatcher",
    ),
    Inert(
        ("--moe-enable-deepep",),
        _TRAINERS,
        lambda context: context.settings.get("train.moe_dispatcher") != "flex",
        "DeepEP is a back end of the flex dispatcher only",
        "add --moe-token-dispatcher-type flex",
        "Megatron-LM megatron/core/transformer/transformer_config.py: TransformerConfig.__post_init__",
        refused=True,
    ),
    Inert(
        ("--rollout-num-gpus",),
        ("miles",),
        _setting("job.colocated"),
        "with --colocate the engines have the trainer's GPUs",
        "drop --rollout-num-gpus, or --colocate",
        f"{_MILES}: --rollout-num-gpus",
    ),
    Inert(
        ("--sglang-tp-size", "--sglang-tensor-parallel-size"),
        ("miles",),
        lambda context: True,
        "it is overwritten by --rollout-num-gpus-per-engine",
        "set --rollout-num-gpus-per-engine",
        "miles miles/backends/sglang_utils/arguments.py: validate_args",
    ),
    Inert(
        ("--max-tokens-per-gpu",),
        ("miles",),
        _without("launch.dynamic_batch"),
        "micro-batches have a fixed number of samples without --use-dynamic-batch-size",
        "add --use-dynamic-batch-size",
        f"{_MILES}: --max-tokens-per-gpu",
    ),
    Inert(
        ("--micro-batch-size",),
        ("miles",),
        _setting("launch.dynamic_batch"),
        "--use-dynamic-batch-size packs by --max-tokens-per-gpu",
        "drop --micro-batch-size",
        f"{_MILES}: --use-dynamic-batch-size",
    ),
    Inert(
        ("--sglang-deepep-mode",),
        ("miles",),
        lambda context: context.settings.get("engine.moe_a2a") not in ("deepep", "mooncake", "nixl"),
        "no expert all-to-all that has modes is chosen",
        "add --sglang-moe-a2a-backend deepep",
        "SGLang python/sglang/srt/layers/moe/utils.py: initialize_moe_config",
    ),
    Inert(
        ("--deepep-mode",),
        ("sglang",),
        lambda context: context.settings.get("engine.moe_a2a") not in ("deepep", "mooncake", "nixl"),
        "no expert all-to-all that has modes is chosen",
        "add --moe-a2a-backend deepep",
        "SGLang python/sglang/srt/layers/moe/utils.py: initialize_moe_config",
    ),
    Inert(
        (f"{_V}ppo_micro_batch_size_per_gpu",),
        ("verl",),
        _setting("launch.dynamic_batch"),
        "use_dynamic_bsz packs by ppo_max_token_len_per_gpu",
        f"drop it, or set {_V}use_dynamic_bsz=False",
        "verl verl/workers/actor/dp_actor.py: update_policy",
    ),
    Inert(
        (f"{_V}ppo_max_token_len_per_gpu",),
        ("verl",),
        _without("launch.dynamic_batch"),
        "it is read with use_dynamic_bsz only",
        f"set {_V}use_dynamic_bsz=True",
        "verl verl/workers/actor/dp_actor.py: update_policy",
    ),
)


_FILES: dict[str, tuple[Project, ...]] = {
    "--config": ("vllm", "sglang"),
    "--yaml-cfg": ("megatron",),
    "--sglang-config": ("miles",),
    "--config-name": ("verl",),
}
"""Options that name a file of further settings."""
_OWN_CONFIGURATIONS = ("ppo_trainer", "ppo_megatron_trainer")


def _settings_files(program: Program, context: Context) -> Iterator[Finding]:
    """Settings that lie in a file of the command's own, and sizes of the model that it changes: nothing is known of
    them."""
    for flag in ("--hf-overrides", "--json-model-override-args"):
        if (option := context.options.by_flag.get(flag)) is not None:
            message = f"line {option.line}: {option.text[:120]}: changes of the model's configuration are not read"
            repair = "name a folder whose config.json has them"
            yield Finding("model-overrides", "warning", message, repair)
    for flag, projects in _FILES.items():
        option = context.options.by_flag.get(flag)
        if option is None or program.project not in projects or not option.values:
            continue
        if (option.values[0].known or "").removesuffix(".yaml") in _OWN_CONFIGURATIONS:
            continue
        message = f"line {option.line}: {option.text[:120]}: settings of a file that is not read"
        repair = "state those of layout and memory with --set-variable, as options of the command"
        yield Finding("settings-file", "warning", message, repair)


_REF = "actor_rollout_ref."
UNPLANNED: dict[str, tuple[Project, str]] = {
    "--lora-rank": ("miles", "LoRA trains adapters alone"),
    "--recompute-modules": ("megatron", "which parts of a layer are recomputed"),
    f"{_REF}model.lora_rank": ("verl", "LoRA trains adapters alone"),
    f"{_REF}model.lora.rank": ("verl", "LoRA trains adapters alone"),
    f"{_REF}actor.fsdp_config.offload_policy": ("verl", "all states in host memory"),
    f"{_REF}actor.fsdp_config.model_dtype": ("verl", "weights, gradients and states in fewer bytes"),
    f"{_REF}actor.megatron.use_megatron_fsdp": ("verl", "weights, gradients and states are spread"),
    f"{_REF}model.enable_activation_offload": ("verl", "activations in host memory"),
    f"{_REF}model.use_fused_kernels": ("verl", "logits are never whole"),
}
"""Options that take memory off a device in a way that is not planned: with one of them an excess is a warning."""

_OFF = ("0", "false", "none", "null", "core_attn", "fp32", "float32")


def unplanned(options: Options, project: Project) -> tuple[str, ...]:
    """The options of ``UNPLANNED`` that a command gives and that are on, with what they do."""
    given: list[str] = []
    for flag, (of, what) in UNPLANNED.items():
        option = options.by_flag.get(flag)
        values = {(value.known or "").strip().lower() for value in option.values} if option else set()
        if option and (of == project or (of, project) == ("megatron", "miles")) and not values <= set(_OFF):
            given.append(f"{flag} ({what})")
    return tuple(given)


def command_findings(program: Program, options: Options, settings: Mapping[str, Any], job: Job | None) -> list[Finding]:
    """Every inert or contradictory option of a command."""
    context = Context(options, settings, job)
    found = [finding for inert in INERT if program.project in inert.projects for finding in _inert(inert, context)]
    found += _settings_files(program, context)
    if program.project == "verl" and "launch.foreign" not in settings:
        found += _other_strategy(context)
    if job is not None:
        found += _visible_devices(job)
    return found


def schedule_findings(program: Program, *, nodes_stated: bool) -> list[Finding]:
    """Where torchrun counts other nodes, or more devices of a node, than the scheduler is asked for."""
    counts = {name: int(text) for name, value in program.wrapper.items() if (text := value.known or "").isdecimal()}
    found: list[Finding] = []
    waited, nodes = counts.get("nnodes"), counts.get("nodes")
    if waited and nodes and waited != nodes and not nodes_stated:
        then = "it waits for ever" if waited > nodes else f"{nodes - waited} of them do nothing"
        message = f"torchrun --nnodes {waited}, but the scheduler is asked for {nodes} nodes: {then}"
        repair = f"torchrun --nnodes {nodes}, or sbatch --nodes {waited} on its own command line"
        found.append(
            Finding("schedule-nodes", "warning", message, repair, "torchrun: rendezvous; Slurm sbatch --nodes")
        )
    processes, devices = counts.get("nproc-per-node"), counts.get("gpus-per-node")
    if processes and devices and processes > devices:
        message = f"torchrun --nproc-per-node {processes}, but the scheduler is asked for {devices} devices a node"
        repair = f"torchrun --nproc-per-node {devices}, or sbatch --gpus-per-node {processes}"
        found.append(Finding("schedule-devices", "warning", message, repair, "Slurm sbatch: --gres, --gpus-per-node"))
    return found


def _inert(inert: Inert, context: Context) -> Iterator[Finding]:
    for flag in inert.flags:
        if context.given(flag) and inert.when(context):
            option = f"line {context.line(flag)}: {context.options.by_flag[flag].text}"
            unless = ", unless options that are not known say otherwise" if context.options.opaque else ""
            because = f"{inert.because}{unless}"
            if inert.refused:
                severity = "warning" if unless else "error"
                yield Finding("flag-refused", severity, f"{option}: {because}", inert.repair, inert.source)
            else:
                message = f"{option} has no effect: {because}"
                yield Finding("flag-inert", "warning", message, inert.repair, inert.source)


def _other_strategy(context: Context) -> Iterator[Finding]:
    """verl: keys of the back end that ``strategy`` does not choose."""
    chosen = context.settings.get("train.backend", "fsdp")
    other = "actor_rollout_ref.actor.megatron." if chosen == "fsdp" else "actor_rollout_ref.actor.fsdp_config."
    strays = [option for flag, option in context.options.by_flag.items() if flag.startswith(other)]
    if strays:
        names = ", ".join(option.flag.removeprefix(other) for option in strays[:6])
        more = f" and {len(strays) - 6} more" if len(strays) > 6 else ""
        message = f"line {strays[0].line}: {other}{{{names}{more}}} have no effect: the actor's strategy is {chosen}"
        wanted = "megatron" if chosen == "fsdp" else "fsdp"
        repair = f"set actor_rollout_ref.actor.strategy={wanted} (--config-name=ppo_megatron_trainer has it)"
        yield Finding(
            "flag-inert", "warning", message, repair if wanted == "megatron" else "drop them", "verl actor.yaml"
        )


def visible_devices(variables: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Devices that each of the ``*_VISIBLE_DEVICES`` lists by number."""
    listed = {name: variables[name] for name in _VISIBILITY if name in variables}
    return {
        name: tuple(piece.strip() for piece in text.split(","))
        for name, text in listed.items()
        if re.fullmatch(r"[0-9]+(\s*,\s*[0-9]+)*", text)
    }


def _visible_devices(job: Job) -> Iterator[Finding]:
    """Devices that the script hides from its own processes, and variables for it that disagree (ray#46563)."""
    lists: dict[str, tuple[str, ...]] = {}
    for table in job.environment.values():
        lists |= visible_devices(table)
    for name, devices in lists.items():
        if len(devices) < job.gpus_per_node:
            message = f"{name} shows {len(devices)} devices, and the command uses {job.gpus_per_node} a node"
            repair = f"show {job.gpus_per_node} devices, or use {len(devices)} a node"
            yield Finding("visible-devices", "error", message, repair, "CUDA and HIP: *_VISIBLE_DEVICES")
    if len({*lists.values()}) > 1:
        shown = ", ".join(f"{name}={','.join(devices)}" for name, devices in lists.items())
        message = f"{shown}: each layer obeys another one of these"
        yield Finding("visible-devices", "warning", message, "set one of them", "ray-project/ray#46563")


def environment_findings(program: Program, exported: Mapping[str, str], reaches_workers: bool) -> list[Finding]:
    """Variables of engines, kernels and collectives that the script exports but that its processes never get.

    ``exported`` are the script's own exports; a Ray job gets what ``--runtime-env-json`` names, and what the shell of
    ``ray start`` had (``reaches_workers``).
    """
    if not program.submitted or reaches_workers:
        return []
    passed = set(program.environment) - set(exported)
    found: list[Finding] = []
    for name in sorted(exported):
        if ENGINE_VARIABLES.match(name) and name not in passed:
            value = masked(name, exported[name][:80])
            message = f"{name}={value} is exported to `ray job submit` only: no process of the job gets it"
            repair = f"name {name} in env_vars of --runtime-env-json, or export it before `ray start`"
            found.append(
                Finding("variable-not-passed", "warning", message, repair, "Ray: runtime environments, env_vars")
            )
    return found
