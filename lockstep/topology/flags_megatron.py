"""Megatron's flags as settings of a job. Sources are files of NVIDIA/Megatron-LM at d98e8a64."""

from __future__ import annotations

import re

from lockstep.topology.launch_flags import NotRead, Row, choice, integer, number, text

_ARGUMENTS = "megatron/training/arguments.py"
_DISTRIBUTED = f"{_ARGUMENTS}: _add_distributed_args"
_TRAINING = f"{_ARGUMENTS}: _add_training_args"
_PRECISION = f"{_ARGUMENTS}: _add_mixed_precision_args"
_EXPERIMENTAL = f"{_ARGUMENTS}: _add_experimental_args"
_SIZE = f"{_ARGUMENTS}: _add_network_size_args"
_MOE = f"{_ARGUMENTS}: _add_moe_args"
_PARALLEL = "megatron/core/model_parallel_config.py: ModelParallelConfig"
_TRANSFORMER = "megatron/core/transformer/transformer_config.py: TransformerConfig"
_DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


def hierarchy(value: str) -> tuple[int, ...]:
    """Sizes in one value, for flags that take several."""
    return tuple(integer(piece) for piece in value.split())


def layer_frequency(value: str) -> int:
    """Leading dense layers of ``--moe-layer-freq``: a list of 0 and 1 as Python writes it, with ``[0]*3+[1]*75``.

    Source: ``megatron/training/arguments.py: moe_freq_type``. Raises ValueError for what is no such list, NotRead for a
    pattern that isn't dense layers first.
    """
    layers: list[int] = []
    if re.fullmatch(r"[0-9]+", value.strip()):
        if int(value) != 1:
            raise NotRead(f"expert layers at every {value}th layer are not read")
        return 0
    for term in value.replace(" ", "").split("+"):
        match = re.fullmatch(r"\(?\[([01](?:,[01])*)\]\)?(?:\*([0-9]{1,4}))?", term)
        if match is None:
            raise ValueError(f"{value[:60]!r} is no list of 0 and 1")
        layers += [int(piece) for piece in match.group(1).split(",")] * int(match.group(2) or 1)
    dense = layers.index(1) if 1 in layers else len(layers)
    if 0 in layers[dense:]:
        raise NotRead("dense layers after the first expert layer are not read")
    return dense


LAYOUT: dict[str, Row] = {
    "--tensor-model-parallel-size": Row("train.tp", f"{_PARALLEL}.tensor_model_parallel_size", integer),
    "--pipeline-model-parallel-size": Row("train.pp", f"{_PARALLEL}.pipeline_model_parallel_size", integer),
    "--context-parallel-size": Row("train.cp", f"{_PARALLEL}.context_parallel_size", integer),
    "--expert-model-parallel-size": Row("train.ep", f"{_PARALLEL}.expert_model_parallel_size", integer),
    "--expert-tensor-parallel-size": Row("train.etp", f"{_PARALLEL}.expert_tensor_parallel_size", integer),
    "--sequence-parallel": Row("train.sequence_parallel", f"{_PARALLEL}.sequence_parallel"),
    "--num-virtual-stages-per-pipeline-rank": Row("train.virtual_stages", _DISTRIBUTED, integer),
    "--num-layers-per-virtual-pipeline-stage": Row("train.switches.layers_per_virtual_stage", _DISTRIBUTED, integer),
    "--decoder-first-pipeline-num-layers": Row("train.first_stage_layers", _DISTRIBUTED, integer),
    "--decoder-last-pipeline-num-layers": Row("train.last_stage_layers", _DISTRIBUTED, integer),
    "--pipeline-model-parallel-layout": Row("train.switches.pipeline_layout", _DISTRIBUTED, text),
    "--account-for-embedding-in-pipeline-split": Row("train.account_for_embedding", _TRANSFORMER),
    "--account-for-loss-in-pipeline-split": Row("train.account_for_loss", _TRANSFORMER),
    "--microbatch-group-size-per-virtual-pipeline-stage": Row("train.switches.microbatch_group", _DISTRIBUTED, integer),
    "--no-overlap-p2p-communication": Row("train.switches.overlap_p2p", _DISTRIBUTED, present=False),
    "--cp-comm-type": Row("train.cp_comm_type", _DISTRIBUTED, text),
    "--hierarchical-context-parallel-sizes": Row("train.switches.cp_hierarchy", _DISTRIBUTED, hierarchy),
    "--hybrid-context-parallel": Row("train.switches.hybrid_cp", _DISTRIBUTED),
    "--make-vocab-size-divisible-by": Row("train.vocab_divisor", _SIZE, integer),
    "--padded-vocab-size": Row("train.switches.padded_vocab", _SIZE, integer),
    "--num-distributed-optimizer-instances": Row("train.switches.optimizer_instances", _DISTRIBUTED, integer),
    "--tp-comm-overlap": Row("train.switches.tp_comm_overlap", _PARALLEL),
    "--distribute-saved-activations": Row("train.switches.distribute_saved_activations", _TRANSFORMER),
    "--moe-token-dispatcher-type": Row("train.moe_dispatcher", _TRANSFORMER, text),
    "--moe-flex-dispatcher-backend": Row("train.switches.moe_flex_backend", _TRANSFORMER, text),
    "--moe-enable-deepep": Row("train.switches.moe_flex_backend", _TRANSFORMER, present="deepep"),
    "--moe-pad-expert-input-to-capacity": Row("train.switches.moe_pad_to_capacity", _TRANSFORMER),
    "--moe-router-dtype": Row("train.switches.moe_router_dtype", _TRANSFORMER, text),
    "--moe-expert-rank-capacity-factor": Row("train.switches.moe_rank_capacity_factor", _TRANSFORMER, number),
    "--moe-shared-expert-overlap": Row("train.switches.moe_shared_expert_overlap", _TRANSFORMER),
    "--moe-grouped-gemm": Row("train.switches.moe_grouped_gemm", _TRANSFORMER),
    "--moe-router-padding-for-fp8": Row("train.switches.moe_router_padding", _TRANSFORMER),
    "--moe-router-padding-for-quantization": Row("train.switches.moe_router_padding", _TRANSFORMER),
    "--moe-router-enable-expert-bias": Row("train.switches.moe_expert_bias", _TRANSFORMER),
    "--moe-router-pre-softmax": Row("train.switches.moe_pre_softmax", _TRANSFORMER),
    "--overlap-moe-expert-parallel-comm": Row("train.switches.ep_a2a_overlap", _PARALLEL),
    "--calculate-per-token-loss": Row("train.switches.per_token_loss", _TRANSFORMER),
    "--cuda-graph-impl": Row("train.switches.cuda_graphs", _TRANSFORMER, choice({"none": False}, default=True)),
    "--group-query-attention": Row("train.switches.group_query_attention", _SIZE),
    "--attention-backend": Row(
        "train.switches.fused_attention",
        _TRANSFORMER,
        lambda value: {"fused": True, "unfused": False, "local": False}.get(value),
    ),
    "--disable-bias-linear": Row("train.switches.moe_linear_bias", _SIZE, present=False),
    "--no-rope-fusion": Row("train.switches.rope_fusion", _SIZE, present=False),
    "--rope-type": Row("train.switches.rope_type", f"{_ARGUMENTS}: _add_mla_args", text),
    "--optimizer": Row("train.switches.optimizer", _TRAINING, text),
    "--use-torch-fsdp2": Row("train.switches.torch_fsdp2", _DISTRIBUTED),
    "--use-megatron-fsdp": Row("train.switches.megatron_fsdp", _DISTRIBUTED),
    "--data-parallel-sharding-strategy": Row("train.switches.fsdp_sharding", _DISTRIBUTED, text),
}
"""Parallel sizes and what only the layout rules read."""

MEMORY: dict[str, Row] = {
    "--bf16": Row("memory.weight_dtype", _PRECISION, present="bf16"),
    "--fp16": Row("memory.weight_dtype", _PRECISION, present="bf16"),  # as many bytes
    "--fp8-format": Row("launch.fp8_format", f"{_ARGUMENTS}: _add_transformer_engine_args", text),
    "--fp8-recipe": Row(
        "launch.fp8_recipe",
        f"{_ARGUMENTS}: _add_transformer_engine_args",
        choice({"blockwise": "blockwise", "delayed": "delayed", "tensorwise": "delayed", "mxfp8": "mxfp8"}),
    ),
    "--fp8-param-gather": Row("memory.fp8_param_gather", f"{_ARGUMENTS}: _add_transformer_engine_args"),
    "--grad-reduce-in-bf16": Row("memory.grad_dtype", _PRECISION, present="bf16"),
    "--main-grads-dtype": Row("launch.main_grads", _EXPERIMENTAL, choice({"fp32": "fp32", "bf16": "bf16"})),
    "--main-params-dtype": Row("memory.master_dtype", _EXPERIMENTAL, choice({"fp32": "fp32", "fp16": "fp16"})),
    "--exp-avg-dtype": Row("memory.moment_dtype", _EXPERIMENTAL, choice(_DTYPES)),
    "--use-distributed-optimizer": Row("memory.distributed_optimizer", _DISTRIBUTED),
    "--use-precision-aware-optimizer": Row("memory.precision_aware_optimizer", _EXPERIMENTAL),
    "--overlap-param-gather": Row("memory.overlap_param_gather", _DISTRIBUTED),
    "--overlap-grad-reduce": Row("memory.overlap_grad_reduce", _DISTRIBUTED),
    "--optimizer-cpu-offload": Row("launch.optimizer_offload", _TRAINING),
    "--optimizer-offload-fraction": Row("launch.optimizer_offload_fraction", _TRAINING, number),
    "--cpu-offloading-num-layers": Row("memory.offload_activations", _TRANSFORMER, lambda value: integer(value) > 0),
    "--fine-grained-activation-offloading": Row("memory.offload_activations", _TRANSFORMER),
    "--recompute-granularity": Row(
        "memory.recompute", _TRANSFORMER, choice({"full": "full", "selective": "selective"})
    ),
    "--recompute-activations": Row("memory.recompute", _TRAINING, present="selective"),
    "--recompute-method": Row(
        "memory.recompute_method", _TRANSFORMER, choice({"uniform": "uniform", "block": "block"})
    ),
    "--recompute-num-layers": Row("memory.recompute_num_layers", _TRANSFORMER, integer),
}
"""Precision, optimizer, recomputation, offload."""

BATCH: dict[str, Row] = {
    "--micro-batch-size": Row("batch.micro_batch", _TRAINING, integer),
    "--global-batch-size": Row("batch.global_batch", _TRAINING, integer),
    "--seq-length": Row("launch.sequence", f"{_ARGUMENTS}: _add_data_args", integer),
    "--grpo-prompts-per-step": Row("batch.num_prompts", f"{_ARGUMENTS}: _add_rl_args", integer),
    "--grpo-group-size": Row("batch.group_size", f"{_ARGUMENTS}: _add_rl_args", integer),
}
"""Batches."""

MODEL: dict[str, Row] = {
    "--num-layers": Row("model.num_layers", f"{_TRANSFORMER}.num_layers", integer),
    "--hidden-size": Row("model.hidden", f"{_TRANSFORMER}.hidden_size", integer),
    "--ffn-hidden-size": Row("model.ffn", f"{_TRANSFORMER}.ffn_hidden_size", integer),
    "--num-attention-heads": Row("model.num_heads", f"{_TRANSFORMER}.num_attention_heads", integer),
    "--num-query-groups": Row("model.num_kv_heads", f"{_TRANSFORMER}.num_query_groups", integer),
    "--kv-channels": Row("model.head_dim", f"{_TRANSFORMER}.kv_channels", integer),
    "--vocab-size": Row("model.vocab", f"{_ARGUMENTS}: _add_tokenizer_args", integer),
    "--qk-layernorm": Row("model.qk_norm", _TRANSFORMER),
    "--add-qkv-bias": Row("model.attention_bias", _TRANSFORMER),
    "--swiglu": Row("launch.swiglu", _SIZE),
    "--untie-embeddings-and-output-weights": Row("model.tied_embeddings", _SIZE, present=False),
    "--num-experts": Row("model.num_experts", _MOE, integer),
    "--moe-ffn-hidden-size": Row("model.moe_ffn", _TRANSFORMER, integer),
    "--moe-router-topk": Row("model.experts_per_token", _TRANSFORMER, integer),
    "--moe-shared-expert-intermediate-size": Row("launch.shared_ffn", _TRANSFORMER, integer),
    "--moe-layer-freq": Row("model.dense_layers", f"{_ARGUMENTS}: moe_freq_type", layer_frequency),
    "--moe-router-score-function": Row(
        "model.router_score",
        _TRANSFORMER,
        choice({"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrtsoftplus"}),
    ),
    "--multi-latent-attention": Row("launch.mla", _TRANSFORMER),
    "--q-lora-rank": Row("model.q_lora_rank", f"{_ARGUMENTS}: _add_mla_args", integer),
    "--kv-lora-rank": Row("model.kv_lora_rank", f"{_ARGUMENTS}: _add_mla_args", integer),
    "--qk-head-dim": Row("model.qk_nope_head_dim", f"{_ARGUMENTS}: _add_mla_args", integer),
    "--qk-pos-emb-head-dim": Row("model.rope_head_dim", f"{_ARGUMENTS}: _add_mla_args", integer),
    "--v-head-dim": Row("model.v_head_dim", f"{_ARGUMENTS}: _add_mla_args", integer),
    "--experimental-attention-variant": Row(
        "launch.attention_variant", f"{_ARGUMENTS}: _add_experimental_attention_variant_args", text
    ),
    "--mtp-num-layers": Row("model.mtp_layers", f"{_TRANSFORMER}.mtp_num_layers", integer),
}
"""Sizes of the model."""

TRAINER: dict[str, Row] = {**LAYOUT, **MEMORY, **BATCH, **MODEL}
"""All rows of Megatron."""
