"""A configuration as a ``Job``: what the layout rules judge and the memory planner counts. No torch, no model.

RunConfig ──job_of──► Job ──► check_layout, plan_memory, suggest, evidence
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.process_checks import IN_BUCKETS, chosen_transport
from lockstep.config.schema import Dtype, GgufModel, ModelSource, PathModel, RandomModel, RunConfig
from lockstep.topology.catalogue import hardware, model_shape
from lockstep.topology.records import (
    Batch,
    EngineLayout,
    Job,
    MegatronSwitches,
    ModelShape,
    TrainLayout,
    TrainMemory,
)

THIS_MACHINE = "cpu"
"""The kind of device that a configuration without ``cluster.hardware`` is planned for."""

Short = Literal["bf16", "fp32"]
_SHORT: dict[str, Any] = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "float8": "fp8"}


def job_of(config: RunConfig) -> Job:
    """The job that a configuration means. Raises ``ConfigError`` for a name that is in no catalogue and for a model
    whose sizes nothing here tells."""
    cluster = config.cluster
    return Job(
        name=config.name,
        model=shape_of(config.model),
        hardware=hardware(cluster.hardware or THIS_MACHINE),
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        train=train_layout(config),
        memory=train_memory(config),
        engine=engine_layout(config),
        batch=batch(config),
        colocated=cluster.colocated,
        rollout_gpus=cluster.rollout_gpus,
        routing_replay=config.trainer.routing_replay,
        indexer_replay=config.trainer.megatron.indexer_replay,
        refit_bucket_bytes=config.refit.bucket_bytes if chosen_transport(config) in IN_BUCKETS else None,
        environment=environment_of(config),
    )


def shape_of(source: ModelSource) -> ModelShape:
    """The model's sizes: by its name in the catalogue, from its ``config.json``, or from a random model's settings."""
    if not isinstance(source, RandomModel) and source.catalogue is not None:
        return model_shape(source.catalogue)
    if isinstance(source, GgufModel):
        raise _unknown_shape("a GGUF file's sizes are not read for a plan")
    from lockstep.topology.shapes import shape_from_config

    if isinstance(source, PathModel):
        return shape_from_config(_config_json(Path(source.path)), Path(source.path).name)
    return shape_from_config({"model_type": source.model_type, **source.config}, f"random {source.model_type}")


def _config_json(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _unknown_shape(f"config.json can't be read: {error}") from error
    if not isinstance(found, dict):
        raise _unknown_shape("config.json holds no object")
    return found


def _unknown_shape(why: str) -> ConfigError:
    way_out = "name the model of the catalogue that it is: model.catalogue"
    return ConfigError("plan", [Violation("model.catalogue", why, way_out)])


def train_layout(config: RunConfig) -> TrainLayout:
    """How the trainer's ranks share the model."""
    trainer, layout = config.trainer, config.trainer.layout
    megatron = trainer.megatron
    return TrainLayout(
        backend=trainer.backend,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        replicate=layout.replicate,
        virtual_stages=layout.virtual_stages,
        first_stage_layers=layout.first_stage_layers,
        last_stage_layers=layout.last_stage_layers,
        stage_layers=layout.stage_layers,
        account_for_embedding=layout.account_for_embedding,
        account_for_loss=layout.account_for_loss,
        sequence_parallel=layout.sequence_parallel,
        cp_comm_type=layout.cp_comm_type,
        cp_partition=layout.cp_partition,
        moe_dispatcher=layout.moe_dispatcher,
        vocab_divisor=layout.vocab_divisor,
        switches=MegatronSwitches(implementation=megatron.implementation if trainer.backend == "megatron" else None),
    )


def train_memory(config: RunConfig) -> TrainMemory:
    """Precision, optimizer and recomputation. The fsdp trainer has masters and moments of one dtype, gradients in the
    masters', and recomputes whole layers or none."""
    trainer, megatron = config.trainer, config.trainer.megatron
    if trainer.backend == "fsdp":
        master = short(trainer.master_dtype)
        return TrainMemory(
            weight_dtype=short(trainer.dtype),
            grad_dtype=master,
            master_dtype=master,
            moment_dtype=master,
            recompute="full" if trainer.gradient_checkpointing else "none",
        )
    return TrainMemory(
        weight_dtype=short(trainer.dtype),
        fp8=megatron.fp8,
        fp8_param_gather=megatron.fp8_param_gather,
        grad_dtype=_SHORT[megatron.grad_dtype],
        master_dtype=short(trainer.master_dtype),
        moment_dtype=_SHORT[megatron.moment_dtype],
        distributed_optimizer=megatron.distributed_optimizer,
        precision_aware_optimizer=megatron.precision_aware_optimizer,
        overlap_param_gather=megatron.overlap_param_gather,
        overlap_grad_reduce=megatron.overlap_grad_reduce,
        optimizer_offload_fraction=megatron.optimizer_offload_fraction,
        offload_weights=megatron.offload_weights,
        offload_target=megatron.offload_target,
        rematerialise_weights=megatron.rematerialise_weights,
        stream_optimizer=megatron.stream_optimizer,
        offload_activations=megatron.offload_activations,
        recompute=megatron.recompute,
        recompute_method=megatron.recompute_method,
        recompute_num_layers=megatron.recompute_num_layers,
    )


def short(dtype: Dtype) -> Short:
    """A dtype of the configuration as the topology's records write it."""
    return _SHORT[dtype]


def engine_layout(config: RunConfig) -> EngineLayout:
    """One rollout engine. The torch engine's cache is in the engine's own dtype."""
    rollout, layout = config.rollout, config.rollout.layout
    vllm, more = rollout.vllm, rollout.sglang.engine_args
    is_vllm = rollout.engine == "vllm"
    page = vllm.engine_args.get("block_size") if is_vllm else more.get("page_size")
    mode = more.get("deepep_mode")
    return EngineLayout(
        engine=rollout.engine,
        gpus_per_engine=layout.gpus_per_engine,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        dp_attention=layout.dp_attention,
        moe_a2a=layout.moe_a2a,
        memory_fraction=layout.memory_fraction,
        kv_cache_dtype=short(rollout.dtype) if rollout.engine == "torch" else layout.kv_cache_dtype,
        weight_dtype=short(rollout.dtype),
        quantisation=rollout.quantisation,
        max_running_requests=rollout.num_slots,
        max_total_tokens=layout.max_total_tokens,
        kv_cache_bytes=vllm.kv_cache_bytes if is_vllm else None,
        chunked_prefill_tokens=rollout.prefill_tokens,
        speculative=layout.speculative,
        moe_dense_tp=_integer(more.get("moe_dense_tp_size")),
        page_tokens=_integer(page),
        moe_runner=_text(more.get("moe_runner_backend")),
        deepep_mode=mode if mode in ("auto", "normal", "low_latency") else None,
        cuda_graphs=not vllm.enforce_eager if is_vllm else None,
        attention_backend=None if is_vllm else _text(more.get("attention_backend")),
        custom_all_reduce=False if more.get("disable_custom_all_reduce") is True else None,
    )


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def batch(config: RunConfig) -> Batch:
    """What one rollout batch and one optimizer step hold."""
    algorithm, trainer = config.algorithm, config.trainer
    steps = algorithm.optimizer_steps_per_batch
    samples = algorithm.num_prompts * algorithm.group_size
    packing = trainer.packing not in ("padded", "single")
    fixed = packing and trainer.megatron.micro_batch is not None  # a number of samples, whatever their tokens
    return Batch(
        num_prompts=algorithm.num_prompts,
        group_size=algorithm.group_size,
        optimizer_steps=steps,
        global_batch=samples // steps if samples % steps == 0 else None,
        micro_batch=trainer.megatron.micro_batch,
        max_tokens_per_gpu=None if fixed else trainer.micro_batch_tokens,
        prompt_tokens=config.prompt.max_tokens,
        response_tokens=config.rollout.max_new_tokens,
        packing=packing,
        pad_multiple=trainer.megatron.pad_multiple,
        logprob_chunk_tokens=trainer.logprob_chunk_tokens,
    )


def environment_of(config: RunConfig) -> dict[str, dict[str, str]]:
    """The variables that the recipe sets, by process."""
    return {"trainer": dict(config.environment.trainer), "engine": dict(config.environment.engine)}
