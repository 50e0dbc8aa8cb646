"""The sections that say on what a run is spread: devices, the trainer's and the engine's parallel layouts, Megatron's
memory settings. ``schema.py`` puts them into the whole configuration.

``lockstep plan`` reads all of them, whatever is installed here. ``lockstep train`` runs the fsdp trainer on one rank
and refuses by name what it can't run yet. Settings that the chosen backend or engine does not read are refused
(``cluster_checks.py``).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lockstep.config.section import Section


class ClusterConfig(Section):
    """The devices of the job and who has them."""

    hardware: str | None = Field(
        default=None,
        description="Kind of device, by its name in the catalogue (mi355x, h200, …); none: this machine's. It selects "
        "the recipe's overlay.",
    )
    nodes: int = Field(default=1, ge=1, description="Machines.")
    gpus_per_node: int = Field(default=1, ge=1, description="Devices of each machine; 1 on a CPU.")
    colocated: bool = Field(
        default=True,
        description="true: engines share the trainer's devices; false: they have rollout_gpus of their own.",
    )
    rollout_gpus: int = Field(
        default=0,
        ge=0,
        description="Devices that only engines use, out of nodes × gpus_per_node; the trainer has the rest.",
    )
    unverified: bool = Field(
        default=False,
        description="Run a layout that no evidence in the catalogue covers (as --unverified); kept with the run.",
    )


class TrainLayoutConfig(Section):
    """How the trainer's ranks share the model. ``docs/plan.md`` has the rules."""

    tp: int = Field(default=1, ge=1, description="Tensor parallel size (megatron).")
    pp: int = Field(default=1, ge=1, description="Pipeline parallel size (megatron).")
    cp: int = Field(default=1, ge=1, description="Context parallel size (megatron).")
    ep: int = Field(default=1, ge=1, description="Expert parallel size (megatron).")
    etp: int | None = Field(
        default=None, ge=1, description="Tensor parallel size within an expert (megatron); none: equal to tp."
    )
    replicate: int | None = Field(
        default=None, ge=1, description="Replicas of the sharded model (fsdp); none: one, sharded over all ranks."
    )
    virtual_stages: int | None = Field(default=None, ge=1, description="Chunks of layers on each pipeline rank.")
    first_stage_layers: int | None = Field(default=None, ge=1, description="Layers of the first pipeline stage.")
    last_stage_layers: int | None = Field(default=None, ge=1, description="Layers of the last pipeline stage.")
    stage_layers: tuple[int, ...] = Field(default=(), description="Layers of every pipeline stage, in order.")
    account_for_embedding: bool = Field(
        default=False, description="Count the embedding as a layer when the layers are split evenly over the stages."
    )
    account_for_loss: bool = Field(default=False, description="Count the loss as a layer, as account_for_embedding.")
    sequence_parallel: bool = Field(
        default=False, description="Shard activations between tensor parallel parts; a MoE with tp > 1 needs it."
    )
    cp_comm_type: Literal["p2p", "a2a", "all_gather", "a2a+p2p"] | None = Field(
        default=None, description="How context parallel ranks exchange keys and values; none: the trainer's default."
    )
    cp_partition: Literal["zigzag", "contiguous"] | None = Field(
        default=None, description="How a sequence is cut over context parallel ranks; none: the trainer's default."
    )
    moe_dispatcher: Literal["allgather", "alltoall", "flex"] | None = Field(
        default=None, description="How tokens reach their experts' ranks; none: the trainer's default."
    )
    vocab_divisor: int = Field(
        default=128, ge=1, description="The vocabulary is padded to a multiple of this times tp (megatron)."
    )


class MegatronConfig(Section):
    """Memory and precision of the Megatron trainer; the shared settings are in ``[trainer]``."""

    implementation: Literal["upstream", "miles", "verl"] = Field(
        default="upstream",
        description="Whose Megatron: the forks lift some of its limits, and have arguments of their own.",
    )
    micro_batch: int | None = Field(
        default=None, ge=1, description="Sequences of a micro-batch; none: filled up to trainer.micro_batch_tokens."
    )
    pad_multiple: int | None = Field(
        default=None,
        ge=1,
        description="A packed micro-batch is padded to a multiple of this; none: the trainer's default.",
    )
    fp8: Literal["none", "blockwise", "delayed", "mxfp8"] = Field(
        default="none", description="Recipe of the fp8 products in forward and backward."
    )
    fp8_param_gather: bool = Field(default=False, description="Keep and gather the weights in fp8.")
    grad_dtype: Literal["bfloat16", "float32"] = Field(default="float32", description="Gradient buffer and reduction.")
    moment_dtype: Literal["float32", "bfloat16", "float16", "float8"] = Field(
        default="float32", description="Adam's moments; others than float32 need precision_aware_optimizer."
    )
    distributed_optimizer: bool = Field(
        default=True, description="Shard the optimizer's states over data parallel ranks."
    )
    precision_aware_optimizer: bool = Field(
        default=False, description="Optimizer states in their own dtypes; offloading them needs it."
    )
    overlap_grad_reduce: bool = Field(default=False, description="Reduce gradients while the backward goes on.")
    overlap_param_gather: bool = Field(default=False, description="Gather weights while the forward goes on.")
    optimizer_offload_fraction: float = Field(
        default=0.0, ge=0, le=1, description="Share of the optimizer's states kept and stepped in host memory."
    )
    offload_weights: bool = Field(
        default=False, description="Move the trainer to host memory while colocated engines generate."
    )
    offload_target: Literal["cpu", "disk"] = Field(
        default="cpu", description="Where offload_weights puts the trainer: host memory, or the node's own disk."
    )
    rematerialise_weights: bool = Field(
        default=False,
        description="With offload_weights: keep no copy of the weights, make them again from the masters.",
    )
    stream_optimizer: bool = Field(
        default=False,
        description="Keep the optimizer's states on the node's own disk and pass them through the device.",
    )
    offload_activations: bool = Field(default=False, description="Keep activations in host memory until the backward.")
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="Activations computed anew in the backward: none, attention only, or whole layers."
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        default=None, description="With full: every so many layers, or the first so many of a stage."
    )
    recompute_num_layers: int | None = Field(default=None, ge=1, description="The number in recompute_method.")
    indexer_replay: bool = Field(
        default=False, description="Sparse attention: use the positions that the engine's indexer chose."
    )
    freeze_router: bool = Field(default=False, description="Leave the routers' weights and biases as they are.")
    deterministic: bool = Field(default=False, description="Only kernels whose result does not depend on their order.")


class EngineLayoutConfig(Section):
    """One rollout engine: its devices, how they share the model, and its memory (vllm, sglang)."""

    gpus_per_engine: int = Field(default=1, ge=1, description="Devices of one engine.")
    tp: int = Field(default=1, ge=1, description="Tensor parallel size; SGLang's includes dp.")
    pp: int = Field(default=1, ge=1, description="Pipeline parallel size.")
    dp: int = Field(default=1, ge=1, description="Data parallel size; SGLang: of attention, within tp.")
    ep: int = Field(default=1, ge=1, description="Expert parallel size; vLLM's is tp · dp or 1.")
    dp_attention: bool = Field(default=False, description="Attention data parallel within tp (sglang).")
    moe_a2a: str | None = Field(
        default=None, description="Backend of the experts' all-to-all (deepep, mori, …); none: the engine's default."
    )
    memory_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="SGLang: mem_fraction_static, of the memory free before loading; vLLM: gpu_memory_utilization, of "
        "the card. none: the engine's default, or rollout.vllm.kv_cache_bytes.",
    )
    kv_cache_dtype: Literal["bf16", "fp8"] = Field(default="bf16", description="Cached keys and values.")
    max_total_tokens: int | None = Field(
        default=None, ge=1, description="Most cached tokens (sglang); none: what the memory holds."
    )
    speculative: bool = Field(default=False, description="Speculative decoding with the model's own MTP layer.")


class SglangConfig(Section):
    """Settings of the SGLang engine alone."""

    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="More of SGLang's server arguments (kernels, graphs, watchdog), of those that don't decide what is "
        "sampled, by which weights or where; others are refused with the list.",
    )
