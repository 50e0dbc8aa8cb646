"""From the settings that a launch command states to a job: each project's defaults and its way to count devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lockstep.topology.flags_verl import DEFAULTS, MAX_TOKENS
from lockstep.topology.flags_verl import ENVIRONMENT as VERL_ENVIRONMENT
from lockstep.topology.launch_models import KnownModel, unknown_shape
from lockstep.topology.launch_programs import Program
from lockstep.topology.records import (
    Batch,
    EngineLayout,
    Hardware,
    Job,
    MegatronSwitches,
    TrainLayout,
    TrainMemory,
)

Settings = dict[str, Any]

MAX_DEVICES = 1 << 16
NODES_ASSUMED = "the number of nodes is not known: 1 assumed (--nodes states it)"
_SIZES = (
    *(
        "nodes",
        "gpus_per_node",
        "rollout_gpus",
        "gpus_per_engine",
        "tp",
        "pp",
        "cp",
        "ep",
        "etp",
        "dp",
        "replicate",
        "ulysses",
    ),
    *("virtual_stages", "first_stage_layers", "last_stage_layers", "prefill_cp", "decode_cp", "attention_cp", "moe_dp"),
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices that the user states beside the script."""

    hardware: Hardware | None = None
    nodes: int | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """A job with what was assumed to make it."""

    job: Job
    assumptions: tuple[str, ...]


def part(settings: Mapping[str, Any], prefix: str, record: type) -> dict[str, Any]:
    """The settings of one record: those under ``prefix.`` that it has a field for."""
    names = {item.name for item in fields(record)}
    found = {key.removeprefix(f"{prefix}."): value for key, value in settings.items() if key.startswith(f"{prefix}.")}
    return {name: value for name, value in found.items() if name in names}


def build_job(
    program: Program,
    settings: Settings,
    model: KnownModel | None,
    cluster: Cluster,
    environment: Mapping[str, Mapping[str, str]],
) -> Built:
    """The job of a launch. Raises ValueError where its numbers make none (no device at all)."""
    assumptions: list[str] = []
    shape = model.shape if model else unknown_shape(_experts(settings))
    hardware = cluster.hardware or _hardware_of(environment)
    engine_only = program.project in ("vllm", "sglang") or "launch.foreign" in settings
    engine_only = engine_only or settings.get("launch.rollout_only", False)
    engine = _engine(program, settings, model)
    if settings.get("launch.rollout_external"):
        assumptions.append("the engines are started elsewhere (--rollout-external…): they are not judged")
    if program.project == "verl" and _has_critic(settings):
        assumptions.append("nothing for the critic: its weights, gradients and states come on top of what is counted")
    job = Job(
        name=f"{program.name}, line {program.line}",
        model=shape,
        hardware=hardware,
        train=None if engine_only else _layout(program, settings, model, assumptions),
        memory=_memory(program, settings),
        engine=engine,
        batch=_batch(program, settings),
        environment=_with_own(program, environment),
        **_options(program, settings),
    )
    placed = _placed(job, program, settings, cluster, assumptions)
    _bounded(placed)
    return Built(placed, tuple(assumptions))


def _has_critic(settings: Settings) -> bool:
    """verl/trainer/ppo/utils.py: need_critic; the estimator is GAE where a command leaves it out."""
    stated = settings.get("launch.critic")
    return bool(stated) if stated is not None else settings.get("launch.estimator", "gae") == "gae"


def _bounded(job: Job) -> None:
    """Raises ValueError for numbers that no cluster has: rules try values near them."""
    records = {"train": job.train, "engine": job.engine, "": job}
    for prefix, record in records.items():
        for name in _SIZES:
            value = getattr(record, name, None)
            if isinstance(value, int) and not -1 <= value <= MAX_DEVICES:
                raise ValueError(f"{f'{prefix}.{name}'.lstrip('.')} {value} is beyond {MAX_DEVICES}")
    if job.num_gpus > MAX_DEVICES:
        raise ValueError(f"{job.nodes} × {job.gpus_per_node} devices are more than {MAX_DEVICES}")


def _with_own(program: Program, environment: Mapping[str, Mapping[str, str]]) -> Mapping[str, Mapping[str, str]]:
    """The script's variables on top of those that its program sets itself."""
    if program.project != "verl":
        return environment
    return {process: {**VERL_ENVIRONMENT, **table} for process, table in environment.items()}


def _experts(settings: Mapping[str, Any]) -> int:
    """Experts of a model that is not known: as many as the trainer or the engine spreads, 0 where neither does."""
    sizes = [settings.get(key, 0) or 0 for key in ("train.ep", "engine.ep", "model.num_experts")]
    spread = max([*(size for size in sizes if size > 1), 0])
    return spread or (2 if settings.get("launch.expert_parallel") else 0)


def _hardware_of(environment: Mapping[str, Mapping[str, str]]) -> Hardware:
    names = {name for table in environment.values() for name in table}
    amd = any(name.startswith(("HIP_", "ROCR_", "HSA_", "RCCL_", "AITER_")) for name in names)
    return Hardware(name="devices that are not stated", vendor="amd" if amd else "nvidia")


def _layout(program: Program, settings: Settings, model: KnownModel | None, assumptions: list[str]) -> TrainLayout:
    values = part(settings, "train", TrainLayout)
    switches = part(settings, "train.switches", MegatronSwitches)
    defaults: dict[str, Any] = {"backend": "megatron"}
    if program.project == "verl":
        defaults = {"backend": "fsdp", "sequence_parallel": True}
        switches.setdefault("implementation", "verl")
    elif program.project == "miles":
        switches.setdefault("implementation", "miles")
    else:
        switches.setdefault("implementation", "upstream")
    values = {**defaults, **values}
    if program.project == "verl" and values.get("tp", 1) == 1:
        values["sequence_parallel"] = False  # verl turns it off itself where tp is 1
    if values["backend"] == "fsdp":
        keep = ("backend", "replicate", "ulysses", "vocab_divisor")
        return TrainLayout(**{name: value for name, value in values.items() if name in keep})
    if program.project == "megatron":
        switches.setdefault("moe_linear_bias", True)  # Megatron's own default, off by --disable-bias-linear
    layout = TrainLayout(**values, switches=MegatronSwitches(**switches))
    if layout.moe_dispatcher is None and program.project == "megatron":
        layout = replace(layout, moe_dispatcher="allgather")  # TransformerConfig.moe_token_dispatcher_type
    sparse = model is not None and model.shape.attention == "mla_dsa" and layout.cp > 1
    if sparse and layout.cp_comm_type is None and is_slime(program):
        layout = replace(layout, cp_comm_type="all_gather")
        assumptions.append("slime's GLM-5 layers gather over the context-parallel ranks (slime_plugins/models/glm5)")
    return layout


def is_slime(program: Program) -> bool:
    """Whether miles' older relative is what the command starts: by a path that names it."""
    paths = [program.name, *(value.text for value in program.environment.values())]
    return any("slime" in path and "miles" not in path for path in paths)


def _memory(program: Program, settings: Settings) -> TrainMemory:
    values = part(settings, "memory", TrainMemory)
    if program.project == "megatron":
        values.setdefault("distributed_optimizer", False)
        values.setdefault("weight_dtype", "fp32")
    if program.project == "verl":
        values.setdefault("offload_optimizer", False)  # its own key, apart from param_offload
    if program.project == "verl" and settings.get("train.backend", "fsdp") == "fsdp":
        values["recompute"] = "full" if settings.get("launch.checkpointing") else "none"
    if settings.get("launch.fp8_format"):
        values.setdefault("fp8", settings.get("launch.fp8_recipe", "delayed"))
    if values.get("precision_aware_optimizer") and "launch.main_grads" in settings:
        values.setdefault("grad_dtype", settings["launch.main_grads"])
    if settings.get("launch.optimizer_offload"):
        values["optimizer_offload_fraction"] = settings.get("launch.optimizer_offload_fraction", 1.0)
    if program.project == "miles" and settings.get("job.colocated"):
        values.setdefault("offload_weights", True)
    return TrainMemory(**values)


def _engine(program: Program, settings: Settings, model: KnownModel | None) -> EngineLayout | None:
    if program.project == "megatron" or settings.get("launch.train_only") or settings.get("launch.rollout_external"):
        return None
    values = part(settings, "engine", EngineLayout)
    names = {"vllm": "vllm", "sglang": "sglang", "miles": "sglang"}
    values.setdefault("engine", names.get(program.project, "vllm"))
    if model and model.quantisation != "none":
        values.setdefault("quantisation", model.quantisation)
    pp, dp = values.get("pp", 1), values.get("dp", 1)
    if program.project == "miles":
        values["tp"] = max(1, values.get("gpus_per_engine", 1) // max(1, pp))
        return EngineLayout(**values)
    tp = values.get("tp", 1)
    if values["engine"] == "vllm":
        ranks = tp * values.get("prefill_cp", 1) * dp
        if settings.get("launch.expert_parallel"):
            values["ep"] = ranks
        values["gpus_per_engine"] = ranks * pp
    else:
        values["gpus_per_engine"] = tp * pp * (1 if values.get("dp_attention") else dp)
    return EngineLayout(**values)


def _batch(program: Program, settings: Settings) -> Batch | None:
    values = part(settings, "batch", Batch)
    if program.project == "megatron":
        if values.get("global_batch") is None:
            return None
        if "num_prompts" not in values:
            # Pre-training has no prompts: one optimizer step takes the global batch, each sample its own group.
            values |= {"num_prompts": values["global_batch"], "group_size": 1, "packing": False}
        values.setdefault("response_tokens", settings.get("launch.sequence"))
    if "num_prompts" not in values:
        return None
    if is_fully_async(program):
        values["num_prompts"] = settings["launch.mini_batch_prompts"] * settings.get("launch.require_batches", 1)
    values.setdefault("group_size", 1)
    samples = values["num_prompts"] * values["group_size"]
    if program.project == "verl":
        values["global_batch"] = settings["launch.mini_batch_prompts"] * values["group_size"]
        if settings.get("launch.dynamic_batch"):
            values.setdefault("max_tokens_per_gpu", MAX_TOKENS)
        else:
            values.pop("max_tokens_per_gpu", None)
        values |= _scoring(settings, values.get("max_tokens_per_gpu", MAX_TOKENS))
    if program.project == "miles" and settings.get("launch.dynamic_batch") and settings.get("launch.score_tokens"):
        values["score_tokens_per_gpu"] = settings["launch.score_tokens"]
    if program.project == "miles" and not settings.get("launch.dynamic_batch"):
        values.pop("max_tokens_per_gpu", None)
        values.setdefault("micro_batch", 1)
    if values.get("max_tokens_per_gpu") is not None:
        values.pop("micro_batch", None)
    global_batch = values.get("global_batch")
    if global_batch and "optimizer_steps" not in values:
        values["optimizer_steps"] = max(1, samples // global_batch)
    return Batch(**values)


def _scoring(settings: Settings, max_tokens: int) -> Settings:
    """verl's log-probs: by tokens as the actor unless they say otherwise, else by samples (rollout.yaml)."""
    if settings.get("launch.score_dynamic", settings.get("launch.dynamic_batch")):
        return {"score_tokens_per_gpu": settings.get("launch.score_tokens", max_tokens)}
    return {"score_micro_batch": settings.get("launch.score_micro_batch")}


def _options(program: Program, settings: Settings) -> dict[str, Any]:
    names = ("fully_async", "max_staleness", "partial_rollout", "pause_mode", "routing_replay", "indexer_replay")
    options = {name: settings[f"job.{name}"] for name in names if f"job.{name}" in settings}
    options["engine_sleeps"] = settings.get("launch.frees_cache", True)
    if "job.refit_bucket_bytes" in settings:
        options["refit_bucket_bytes"] = settings["job.refit_bucket_bytes"]
    elif "launch.bucket_megabytes" in settings and program.project == "verl":
        options["refit_bucket_bytes"] = settings["launch.bucket_megabytes"] << 20
    return options


def _placed(job: Job, program: Program, settings: Settings, cluster: Cluster, assumptions: list[str]) -> Job:
    """The job with its devices."""
    if program.project == "miles":
        placed = _placed_miles(job, settings, cluster)
    elif program.project == "megatron":
        placed = _placed_torchrun(job, program, cluster, assumptions)
    elif program.project == "verl":
        nodes = cluster.nodes or settings["job.nodes"]
        placed = replace(job, nodes=nodes, gpus_per_node=settings["job.gpus_per_node"])
        if rollout := _verl_rollout(program, settings):
            placed = _apart(placed, rollout, job.hardware.gpus_per_node)
    else:
        engine = job.engine
        devices = engine.gpus_per_engine if engine else 1
        local, dp = settings.get("launch.dp_local"), engine.dp if engine else 1
        spread = dp // local if local and dp % local == 0 else -(-devices // job.hardware.gpus_per_node)
        nodes = cluster.nodes or settings.get("job.nodes") or max(1, spread)
        placed = replace(job, nodes=nodes, gpus_per_node=max(1, devices // nodes))
    train = placed.train
    size = settings.get("launch.fsdp_size", -1)
    if train is not None and train.backend == "fsdp" and size > 0 and placed.train_world % size == 0:
        placed = replace(placed, train=replace(train, replicate=placed.train_world // size))
    return placed


def _placed_miles(job: Job, settings: Settings, cluster: Cluster) -> Job:
    per_node = settings.get("launch.actor_gpus_per_node", 8)
    nodes = cluster.nodes or settings.get("launch.actor_nodes", 1)
    rollout = settings.get("launch.rollout_gpus") or 0
    if settings.get("launch.rollout_only") and rollout:
        per_node = min(settings.get("launch.gpus_per_node", 8), rollout)
        return replace(job, nodes=-(-rollout // per_node), gpus_per_node=per_node)
    if settings.get("job.colocated") or job.engine is None:
        return replace(job, nodes=nodes, gpus_per_node=per_node)
    alone = replace(job, nodes=nodes, gpus_per_node=per_node)
    return _apart(alone, rollout, settings.get("launch.gpus_per_node") or job.hardware.gpus_per_node)


def _apart(job: Job, rollout: int, per_node: int) -> Job:
    """A trainer's job with ``rollout`` devices more for the engines, which may share a node with it: ``per_node`` is
    the size of one, whatever the trainer has of it."""
    total, own = job.num_gpus + rollout, job.gpus_per_node
    size = next((size for size in (min(max(own, per_node), total), own) if rollout and total % size == 0), total)
    return replace(job, nodes=total // size, gpus_per_node=size, colocated=False, rollout_gpus=rollout)


def is_fully_async(program: Program) -> bool:
    """Whether verl's trainer takes samples from a queue, which no ``data.train_batch_size`` counts."""
    return program.project == "verl" and "fully_async" in program.name


def _verl_rollout(program: Program, settings: Settings) -> int:
    """Devices of verl's engines where they have their own, else 0."""
    experimental = is_fully_async(program) or "one_step_off" in program.name
    if not experimental and settings.get("launch.trainer_mode") != "separate_async":
        return 0
    per_node = settings.get("launch.rollout_gpus_per_node", 8 if experimental else settings["job.gpus_per_node"])
    return int(settings.get("launch.rollout_nodes", 1 if experimental else 0) * per_node)


def _placed_torchrun(job: Job, program: Program, cluster: Cluster, assumptions: list[str]) -> Job:
    wrapper = {name: value.known for name, value in program.wrapper.items()}
    known = {name: int(text) for name, text in wrapper.items() if text and text.isdigit() and len(text) < 7}
    per_node = next((known[n] for n in ("nproc-per-node", "gpus-per-node", "ntasks-per-node") if n in known), None)
    nodes = cluster.nodes or next((known[n] for n in ("nnodes", "nodes") if n in known), None)
    if per_node is None and "world-size" in known:
        per_node, nodes = known["world-size"], 1
    if per_node is None:
        per_node = job.hardware.gpus_per_node
        assumptions.append(f"GPUs per node are not known: {per_node} assumed")
    if nodes is None:
        nodes = 1
        if "nproc-per-node" not in wrapper or wrapper.keys() & {"nnodes", "nodes"}:
            assumptions.append(NODES_ASSUMED)  # torchrun without --nnodes is one node
    return replace(job, nodes=nodes, gpus_per_node=per_node)


def defaults_of(program: Program) -> Settings:
    """Settings that a project has where its command leaves them out."""
    return dict(DEFAULTS) if program.project == "verl" else {}
