"""verl's hydra keys as settings of a job. Sources: verl-project/verl at b178a3cd and 1dda039b, files of
``verl/trainer/config``."""

from __future__ import annotations

from lockstep.topology.launch_flags import Row, boolean, choice, integer, number, optional, text

_ROLLOUT = "rollout/rollout.yaml"
_ACTOR = "actor/actor.yaml"
_MEGATRON = "engine/megatron.yaml"
_FSDP = "engine/fsdp.yaml"
_TRAINER = "ppo_trainer.yaml"
_DATA = "data/legacy_data.yaml"
_APART = "verl/experimental/*/config: rollout (devices of its own)"
_REPLAY = choice({"disabled": False}, default=True)
_OVERRIDE = "passed to Megatron's TransformerConfig"
_OPTIMIZER = "passed to Megatron's OptimizerConfig"
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf": "torch"}

_A = "actor_rollout_ref.actor."
_M = f"{_A}megatron."
_R = "actor_rollout_ref.rollout."

_GENERAL: dict[str, Row] = {
    "trainer.nnodes": Row("job.nodes", _TRAINER, integer),
    "trainer.n_gpus_per_node": Row("job.gpus_per_node", _TRAINER, integer),
    "actor_rollout_ref.model.path": Row("launch.model", "model/hf_model.yaml", text),
    "model_engine": Row("launch.model_engine", f"{_TRAINER}: defaults", text),
    f"{_A}strategy": Row("train.backend", _ACTOR, choice({"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"})),
    "data.train_batch_size": Row("batch.num_prompts", _DATA, integer),
    "data.max_prompt_length": Row("batch.prompt_tokens", _DATA, integer),
    "data.max_response_length": Row("batch.response_tokens", _DATA, integer),
    f"{_R}n": Row("batch.group_size", _ROLLOUT, integer),
    f"{_A}ppo_mini_batch_size": Row("launch.mini_batch_prompts", _ACTOR, integer),
    f"{_A}ppo_micro_batch_size_per_gpu": Row("batch.micro_batch", _ACTOR, optional(integer)),
    f"{_A}ppo_max_token_len_per_gpu": Row("batch.max_tokens_per_gpu", _ACTOR, integer),
    f"{_A}use_dynamic_bsz": Row("launch.dynamic_batch", _ACTOR, boolean),
    f"{_R}log_prob_use_dynamic_bsz": Row("launch.score_dynamic", _ROLLOUT, boolean),
    f"{_R}log_prob_max_token_len_per_gpu": Row("launch.score_tokens", _ROLLOUT, integer),
    f"{_R}log_prob_micro_batch_size_per_gpu": Row("launch.score_micro_batch", _ROLLOUT, optional(integer)),
    "actor_rollout_ref.model.use_remove_padding": Row("batch.packing", "model/hf_model.yaml", boolean),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Row(
        "launch.checkpointing", "model/hf_model.yaml", boolean
    ),
    f"{_R}free_cache_engine": Row("launch.frees_cache", _ROLLOUT, boolean),
    f"{_A}router_replay.mode": Row("job.routing_replay", f"{_ACTOR}, until January 2026", _REPLAY),
    f"{_M}router_replay.mode": Row("job.routing_replay", _MEGATRON, _REPLAY),
    f"{_R}checkpoint_engine.update_weights_bucket_megabytes": Row("launch.bucket_megabytes", _ROLLOUT, integer),
    "rollout.nnodes": Row("launch.rollout_nodes", _APART, integer),
    "rollout.n_gpus_per_node": Row("launch.rollout_gpus_per_node", _APART, integer),
    f"{_R}nnodes": Row("launch.rollout_nodes", _ROLLOUT, integer),
    f"{_R}n_gpus_per_node": Row("launch.rollout_gpus_per_node", _ROLLOUT, integer),
    "algorithm.adv_estimator": Row("launch.estimator", _TRAINER, text),
    "critic.enable": Row("launch.critic", "critic/critic.yaml", optional(boolean)),
    "trainer.v1.trainer_mode": Row("launch.trainer_mode", _TRAINER, text),
    "async_training.require_batches": Row("launch.require_batches", _APART, integer),
}

_ENGINE: dict[str, Row] = {
    f"{_R}name": Row("engine.engine", _ROLLOUT, choice(_ENGINES)),
    f"{_R}tensor_model_parallel_size": Row("engine.tp", _ROLLOUT, integer),
    f"{_R}pipeline_model_parallel_size": Row("engine.pp", _ROLLOUT, integer),
    f"{_R}data_parallel_size": Row("engine.dp", _ROLLOUT, integer),
    f"{_R}expert_parallel_size": Row("engine.ep", _ROLLOUT, integer),
    f"{_R}gpu_memory_utilization": Row("engine.memory_fraction", _ROLLOUT, number),
    f"{_R}max_num_seqs": Row("engine.max_running_requests", _ROLLOUT, integer),
    f"{_R}max_num_batched_tokens": Row("engine.chunked_prefill_tokens", _ROLLOUT, integer),
    f"{_R}enforce_eager": Row("engine.cuda_graphs", _ROLLOUT, lambda value: not boolean(value)),
    f"{_R}quantization": Row("engine.quantisation", _ROLLOUT, optional(choice({"fp8": "fp8"}))),
    f"{_R}engine_kwargs.vllm.kv_cache_dtype": Row(
        "engine.kv_cache_dtype", "passed to vLLM", choice({"fp8": "fp8", "auto": "bf16"}, default="bf16")
    ),
}

_LAYOUT: dict[str, Row] = {
    f"{_M}tensor_model_parallel_size": Row("train.tp", _MEGATRON, integer),
    f"{_M}pipeline_model_parallel_size": Row("train.pp", _MEGATRON, integer),
    f"{_M}virtual_pipeline_model_parallel_size": Row("train.virtual_stages", _MEGATRON, optional(integer)),
    f"{_M}context_parallel_size": Row("train.cp", _MEGATRON, integer),
    f"{_M}expert_model_parallel_size": Row("train.ep", _MEGATRON, integer),
    f"{_M}expert_tensor_parallel_size": Row("train.etp", _MEGATRON, optional(integer)),
    f"{_M}sequence_parallel": Row("train.sequence_parallel", _MEGATRON, boolean),
    f"{_M}use_distributed_optimizer": Row("memory.distributed_optimizer", _MEGATRON, boolean),
    f"{_M}param_offload": Row("memory.offload_weights", _MEGATRON, boolean),
    f"{_M}optimizer_offload": Row("memory.offload_optimizer", _MEGATRON, boolean),
    f"{_A}fsdp_config.param_offload": Row("memory.offload_weights", _FSDP, boolean),
    f"{_A}fsdp_config.optimizer_offload": Row("memory.offload_optimizer", _FSDP, boolean),
    f"{_A}fsdp_config.fsdp_size": Row("launch.fsdp_size", _FSDP, integer),
    f"{_A}ulysses_sequence_parallel_size": Row("train.ulysses", "actor/dp_actor.yaml", integer),
    f"{_A}fsdp_config.ulysses_sequence_parallel_size": Row("train.ulysses", _FSDP, integer),
}

_TRANSFORMER = f"{_M}override_transformer_config."
_OPTIM = f"{_A}optim.override_optimizer_config."

_PASSED: dict[str, Row] = {
    f"{_TRANSFORMER}recompute_granularity": Row(
        "memory.recompute", _OVERRIDE, optional(choice({"full": "full", "selective": "selective"}))
    ),
    f"{_TRANSFORMER}recompute_method": Row(
        "memory.recompute_method", _OVERRIDE, optional(choice({"uniform": "uniform", "block": "block"}))
    ),
    f"{_TRANSFORMER}recompute_num_layers": Row("memory.recompute_num_layers", _OVERRIDE, optional(integer)),
    f"{_TRANSFORMER}num_layers_in_first_pipeline_stage": Row("train.first_stage_layers", _OVERRIDE, optional(integer)),
    f"{_TRANSFORMER}num_layers_in_last_pipeline_stage": Row("train.last_stage_layers", _OVERRIDE, optional(integer)),
    f"{_TRANSFORMER}pipeline_model_parallel_layout": Row("train.switches.pipeline_layout", _OVERRIDE, optional(text)),
    f"{_TRANSFORMER}account_for_loss_in_pipeline_split": Row("train.account_for_loss", _OVERRIDE, boolean),
    f"{_TRANSFORMER}account_for_embedding_in_pipeline_split": Row("train.account_for_embedding", _OVERRIDE, boolean),
    f"{_TRANSFORMER}moe_token_dispatcher_type": Row("train.moe_dispatcher", _OVERRIDE, text),
    f"{_TRANSFORMER}moe_enable_deepep": Row(
        "train.switches.moe_flex_backend", _OVERRIDE, lambda value: "deepep" if boolean(value) else None
    ),
    f"{_TRANSFORMER}moe_router_dtype": Row("train.switches.moe_router_dtype", _OVERRIDE, text),
    f"{_TRANSFORMER}moe_grouped_gemm": Row("train.switches.moe_grouped_gemm", _OVERRIDE, boolean),
    f"{_TRANSFORMER}moe_shared_expert_overlap": Row("train.switches.moe_shared_expert_overlap", _OVERRIDE, boolean),
    f"{_TRANSFORMER}cp_comm_type": Row("train.cp_comm_type", _OVERRIDE, text),
    f"{_TRANSFORMER}cp_partition_mode": Row(
        "train.cp_partition", _OVERRIDE, choice({"contiguous": "contiguous", "zigzag": "zigzag"})
    ),
    f"{_OPTIM}optimizer_cpu_offload": Row("launch.optimizer_offload", _OPTIMIZER, boolean),
    f"{_OPTIM}optimizer_offload_fraction": Row("launch.optimizer_offload_fraction", _OPTIMIZER, number),
    f"{_OPTIM}use_precision_aware_optimizer": Row("memory.precision_aware_optimizer", _OPTIMIZER, boolean),
}

KEYS: dict[str, Row] = {**_GENERAL, **_ENGINE, **_LAYOUT, **_PASSED}
"""All rows of ``verl.trainer.main_ppo``."""

MAX_TOKENS = 16384
"""``ppo_max_token_len_per_gpu`` where it is left out (actor.yaml)."""

DEFAULTS: dict[str, object] = {
    "job.nodes": 1,
    "job.gpus_per_node": 8,
    "engine.tp": 2,
    "engine.memory_fraction": 0.5,
    "engine.max_running_requests": 256,
    "engine.chunked_prefill_tokens": 8192,
    "batch.num_prompts": 1024,
    "batch.prompt_tokens": 512,
    "batch.response_tokens": 512,
    "batch.group_size": 1,
    "launch.mini_batch_prompts": 256,
    "train.sequence_parallel": True,
    "launch.bucket_megabytes": 2048,
    "launch.checkpointing": True,
    "launch.frees_cache": True,
}
"""verl's own values of keys that a command leaves out, from the same files."""

ENVIRONMENT: dict[str, str] = {
    "NCCL_DEBUG": "WARN",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}
"""What verl itself gives to its workers unless the shell has it (``verl/trainer/constants_ppo.py``)."""
