"""A training job as plain numbers: what the layout rules judge, the memory planner counts and the readers of others'
launch commands produce. No torch, no model: everything here can be filled in on a laptop.

    recipe ──┐                       ┌── layout.check_layout  → findings
    run.sh ──┴──► Job ───────────────┼── memory.plan_memory   → bytes per rank and phase
                                     └── suggest              → other legal layouts, ranked

None means "not stated": a rule that needs the number then says nothing, and the planner says which assumption it made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Backend = Literal["fsdp", "megatron"]
EngineName = Literal["torch", "vllm", "sglang"]
Attention = Literal["gqa", "mla", "mla_dsa", "deepseek_v4", "inkling"]
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """An architecture's sizes: all that parameter counts, caches and layout rules need.

    ``ffn`` is the width of a dense layer's MLP, ``moe_ffn`` of one routed (and one shared) expert. The first
    ``dense_layers`` layers of a MoE are dense. ``compress_ratios`` (DeepSeek-V4), ``window_layers`` (Inkling) and
    ``index_layers`` (layers that own an indexer) are per layer. Inkling has relative positions (``relative_dim``
    features a head over ``relative_extent`` tokens) and short convolutions over ``conv_kernel`` tokens. ``vocab`` is
    the embedding's number of rows.
    Zero or empty: the architecture has none. Source of each catalogue entry: ``catalog/models.toml``.
    """

    name: str
    model_type: str
    architecture: str = ""
    num_layers: int
    hidden: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: Attention = "gqa"
    qk_norm: bool = False
    attention_bias: bool = False
    attention_sinks: bool = False
    tied_embeddings: bool = False
    ffn: int = 0
    dense_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_ffn: int = 0
    router_score: Literal["softmax", "sigmoid", "sqrtsoftplus"] | None = None
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    o_groups: int = 0
    o_lora_rank: int = 0
    sliding_window: int = 0
    window_layers: tuple[int, ...] = ()
    window_kv_heads: int = 0
    compress_ratios: tuple[int, ...] = ()
    hash_layers: int = 0
    hyper_connections: int = 0
    indexer_heads: int = 0
    indexer_head_dim: int = 0
    indexer_topk: int = 0
    index_layers: tuple[int, ...] = ()
    mtp_layers: int = 0
    relative_dim: int = 0
    relative_extent: int = 0
    conv_kernel: int = 0

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        return self.num_experts > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device, as ``catalog/hardware.toml`` has it. ``memory_bytes`` is what was read on one,
    not the vendor's label (None: unknown); bandwidth in GB/s. ``fast_link_gpus``: devices that
    one fast fabric joins where that is not a node (NVL72: 72), None: ``gpus_per_node``."""

    name: str
    vendor: Literal["nvidia", "amd", "cpu"]
    arch: str = ""
    memory_bytes: int | None = None
    memory_bandwidth_gbs: float | None = None
    gpus_per_node: int = 8
    fast_link_gpus: int | None = None
    fp8: Literal["e4m3fn", "e4m3fnuz"] | None = None
    fp4: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSwitches:
    """Megatron's rarer settings, which only its rules read; each option's name is in the comment. None: not stated.

    ``implementation`` says whose rules hold for hyper-connections: upstream Megatron refuses pipelines and full
    recomputation with them, the forks that miles and verl use do not.
    """

    implementation: Literal["upstream", "miles", "verl"] | None = None
    rank_order: str = "tp-cp-ep-dp-pp"  # order of initialize_model_parallel
    optimizer_instances: int = 1  # --num-distributed-optimizer-instances
    layers_per_virtual_stage: int | None = None  # --num-layers-per-virtual-pipeline-stage
    pipeline_layout: str | None = None  # --pipeline-model-parallel-layout, "Et*6|t*6L"
    microbatch_group: int | None = None  # --microbatch-group-size-per-virtual-pipeline-stage
    overlap_p2p: bool = True  # off: --no-overlap-p2p-communication
    tp_comm_overlap: bool = False  # --tp-comm-overlap
    distribute_saved_activations: bool = False  # --distribute-saved-activations
    moe_flex_backend: str | None = None  # --moe-flex-dispatcher-backend: deepep, hybridep, ncclep
    moe_pad_to_capacity: bool = False  # --moe-pad-expert-input-to-capacity
    moe_router_dtype: str | None = None  # --moe-router-dtype
    moe_rank_capacity_factor: float | None = None  # --moe-expert-rank-capacity-factor
    moe_shared_expert_overlap: bool = False  # --moe-shared-expert-overlap
    moe_grouped_gemm: bool = False  # --moe-grouped-gemm
    moe_router_padding: bool | None = None  # --moe-router-padding-for-quantization
    moe_expert_bias: bool = False  # --moe-router-enable-expert-bias
    moe_pre_softmax: bool = False  # --moe-router-pre-softmax
    moe_linear_bias: bool = False  # --add-bias-linear, in experts
    ep_a2a_overlap: bool = False  # --overlap-moe-expert-parallel-comm
    cp_hierarchy: tuple[int, ...] = ()  # --hierarchical-context-parallel-sizes
    hybrid_cp: bool = False  # --hybrid-context-parallel
    per_token_loss: bool | None = None  # --calculate-per-token-loss
    cuda_graphs: bool = False  # --cuda-graph-impl other than none
    group_query_attention: bool = False  # --group-query-attention, which MLA must not have
    fused_attention: bool | None = None  # --attention-backend fused
    rope_fusion: bool | None = None  # off: --no-rope-fusion
    rope_type: str | None = None  # --rope-type
    optimizer: str = "adam"  # --optimizer
    torch_fsdp2: bool = False  # --use-torch-fsdp2
    megatron_fsdp: bool = False  # --use-megatron-fsdp
    fsdp_sharding: str | None = None  # --data-parallel-sharding-strategy; None: its default, optim_grads_params
    te_version: tuple[int, ...] = ()  # Transformer Engine's release
    padded_vocab: int | None = None  # rows of the embedding where they are given and not padded


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLayout:
    """How the trainer's ranks share the model. tp, pp, cp, ep, etp: tensor, pipeline, context, expert and
    expert-tensor parallel size (etp None: Megatron's default, equal to tp). ``replicate``: FSDP's outer data-parallel
    size (None: 1); ``ulysses``: FSDP ranks that share a sequence (verl). ``virtual_stages``: chunks per pipeline rank.
    Pipeline splits: even, or ``first_stage_layers`` and ``last_stage_layers``, or ``stage_layers`` for every stage in
    order."""

    backend: Backend = "fsdp"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    replicate: int | None = None
    ulysses: int = 1
    virtual_stages: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    stage_layers: tuple[int, ...] = ()
    account_for_embedding: bool = False
    account_for_loss: bool = False
    sequence_parallel: bool = False
    cp_comm_type: str | None = None
    cp_partition: Literal["zigzag", "contiguous"] | None = None
    moe_dispatcher: str | None = None
    vocab_divisor: int = 128
    switches: MegatronSwitches = MegatronSwitches()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMemory:
    """Precision, optimizer and recomputation of the trainer. ``optimizer_offload_fraction``: share of the optimizer's
    states kept in host memory. ``offload_weights``: weights and gradients leave the device while engines generate, and
    the optimizer's states with them (None) unless ``offload_optimizer`` says apart whether these are there in training
    alone, as verl does. ``fp8``: weights' recipe in training. ``offload_target``: where ``offload_weights`` puts
    them; ``rematerialise_weights``: no copy is kept, they are made again from the masters; ``stream_optimizer``: states
    live on disk and pass through the device."""

    weight_dtype: Literal["bf16", "fp32"] = "bf16"
    fp8: Literal["none", "blockwise", "delayed", "mxfp8"] = "none"
    fp8_param_gather: bool = False
    grad_dtype: Literal["bf16", "fp32"] = "fp32"
    master_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    moment_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    distributed_optimizer: bool = True
    precision_aware_optimizer: bool = False
    overlap_param_gather: bool = False
    overlap_grad_reduce: bool = False
    optimizer_offload_fraction: float = 0.0
    offload_weights: bool = False
    offload_optimizer: bool | None = None
    offload_target: Literal["cpu", "disk"] = "cpu"
    rematerialise_weights: bool = False
    stream_optimizer: bool = False
    offload_activations: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """One rollout engine: its GPUs and how they share the model. ``memory_fraction`` is SGLang's
    ``mem_fraction_static`` or vLLM's ``gpu_memory_utilization``: each engine's own meaning, see ``memory.py``;
    ``kv_cache_bytes`` overrides it.

    vLLM: a replica has tp·pp·prefill_cp ranks, dp of them make an engine; ep > 1 is ``--enable-expert-parallel``.
    SGLang: tp includes dp under DP attention; ``moe_dp``, ``moe_dense_tp`` and ``attention_cp`` are its own axes.
    ``decode_cp`` is vLLM's ``--decode-context-parallel-size``; ``page_tokens`` its block size, SGLang's page size.
    ``quantisation`` "int4": any four bits with a scale for about 32, of a mixture's experts or of a dense model's
    linears.
    """

    engine: EngineName = "torch"
    gpus_per_engine: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    dp_attention: bool = False
    moe_a2a: str | None = None
    memory_fraction: float | None = None
    kv_cache_dtype: Literal["bf16", "fp8", "fp32"] = "bf16"
    weight_dtype: Literal["bf16", "fp32"] = "bf16"
    quantisation: Literal["none", "fp8", "fp8_ue8m0", "mxfp4_experts", "int4"] = "none"
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    kv_cache_bytes: int | None = None
    chunked_prefill_tokens: int | None = None
    speculative: bool = False
    prefill_cp: int = 1
    decode_cp: int = 1
    attention_cp: int = 1
    moe_dp: int = 1
    moe_dense_tp: int | None = None
    expert_balancer: bool = False
    elastic_ep: bool = False
    page_tokens: int | None = None
    moe_runner: str | None = None
    deepep_mode: Literal["auto", "normal", "low_latency"] | None = None
    cuda_graphs: bool | None = None
    custom_all_reduce: bool | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one rollout batch and one optimizer step hold. ``global_batch`` is samples per optimizer step;
    ``max_tokens_per_gpu`` the token budget of one micro-batch on one context-parallel rank. ``pad_multiple``: a packed
    micro-batch is padded to a multiple of it. ``score_tokens_per_gpu`` and ``score_micro_batch``: the budget or size of
    the trainer's forward alone (both None: as in training)."""

    num_prompts: int
    group_size: int
    optimizer_steps: int = 1
    global_batch: int | None = None
    micro_batch: int | None = None
    max_tokens_per_gpu: int | None = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    packing: bool = True
    pad_multiple: int | None = None
    logprob_chunk_tokens: int | None = None
    score_tokens_per_gpu: int | None = None
    score_micro_batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A whole job. ``nodes × gpus_per_node`` devices; colocated: the engines share the trainer's devices, otherwise
    ``rollout_gpus`` are the engines' own and the trainer has the rest. ``environment`` is what the recipe sets, by
    process ("trainer", "engine"). ``max_staleness``: how many policy versions old a batch may be when it is taken;
    ``pause_mode``: what a weight update does to requests in flight ("abort", "retract", "in_place").
    ``engine_sleeps``: whether a colocated engine frees its memory while the trainer works (None: beside a Megatron
    trainer it does, in Lockstep's own loop its cache stays)."""

    name: str
    model: ModelShape
    hardware: Hardware
    nodes: int = 1
    gpus_per_node: int = 1
    train: TrainLayout | None = TrainLayout()
    memory: TrainMemory = TrainMemory()
    engine: EngineLayout | None = None
    batch: Batch | None = None
    colocated: bool = True
    rollout_gpus: int = 0
    fully_async: bool = False
    max_staleness: int | None = None
    partial_rollout: bool = False
    pause_mode: str | None = None
    engine_sleeps: bool | None = None
    routing_replay: bool = False
    indexer_replay: bool = False
    refit_bucket_bytes: int | None = None
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def num_gpus(self) -> int:
        """All devices of the job."""
        return self.nodes * self.gpus_per_node

    @property
    def train_world(self) -> int:
        """Ranks of the trainer."""
        return self.num_gpus if self.colocated else self.num_gpus - self.rollout_gpus

    @property
    def engine_pool(self) -> int:
        """Devices that engines may use."""
        return self.num_gpus if self.colocated else self.rollout_gpus


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found. ``rule`` is its id ("expert-grid"); ``message`` has the numbers ("etp 1 · ep 4 · pp 2 = 8 does
    not divide world 4"); ``repair`` the nearest legal values ("ep 4 → 2"), empty if there is none; ``source`` where the
    rule is written (project, file, function). ``changes`` is the first repair as settings of the job, by dotted path
    (``(("train.ep", 2),)``)."""

    rule: str
    severity: Severity
    message: str
    repair: str = ""
    source: str = ""
    changes: tuple[tuple[str, Any], ...] = ()

    def text(self) -> str:
        """Lines for a terminal."""
        lines = [f"{self.severity}: {self.rule}: {self.message}"]
        if self.repair:
            lines.append(f"    repair: {self.repair}")
        if self.source:
            lines.append(f"    source: {self.source}")
        return "\n".join(lines)
