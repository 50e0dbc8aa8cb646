"""One planted violation for each layout rule: a job that breaks it, and the repair that the rule has to find.

Every job is legal but for the planted setting, so the rule must be the only finding, notes and ``also`` aside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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

MOE, DENSE, V4, GLM = "qwen3-30b-a3b", "qwen3-4b", "deepseek-v4-flash", "glm-5_2"
FULL = {"recompute": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Planted:
    """``repair`` is the whole text of the repair; ``also``: ids of rules that the same setting breaks by its nature."""

    rule: str
    job: Job
    repair: str
    also: tuple[str, ...] = ()


def megatron(
    model: str | ModelShape = MOE,
    gpus: int = 8,
    device: str = "h200",
    memory: dict[str, Any] | None = None,
    switches: dict[str, Any] | None = None,
    batch: dict[str, Any] | None = None,
    job: dict[str, Any] | None = None,
    **train: Any,
) -> Job:
    """A Megatron job on ``gpus`` devices; sequence parallelism follows tp unless given."""
    train.setdefault("sequence_parallel", train.get("tp", 1) > 1)
    held = max(size for size in range(1, hardware(device).gpus_per_node + 1) if gpus % size == 0)
    return Job(
        name="planted",
        model=model_shape(model) if isinstance(model, str) else model,
        hardware=hardware(device),
        nodes=gpus // held,
        gpus_per_node=held,
        train=TrainLayout(backend="megatron", switches=MegatronSwitches(**(switches or {})), **train),
        memory=TrainMemory(**(memory or {})),
        batch=Batch(**{"num_prompts": 8, "group_size": 8, **batch}) if batch is not None else None,
        **(job or {}),
    )


def fsdp(model: str = DENSE, gpus: int = 8, batch: dict[str, Any] | None = None, **train: Any) -> Job:
    """A job of the FSDP back end."""
    base = megatron(model, gpus, batch=batch)
    return replace(base, train=TrainLayout(backend="fsdp", **train))


def serving(
    engine: str,
    model: str | ModelShape = MOE,
    gpus: int = 8,
    device: str = "h200",
    job: dict[str, Any] | None = None,
    **settings: Any,
) -> Job:
    """An engine alone on its devices."""
    base = megatron(model, gpus, device)
    settings.setdefault("gpus_per_engine", gpus)
    return replace(base, train=None, engine=EngineLayout(engine=engine, **settings), **(job or {}))  # type: ignore[arg-type]


def together(
    gpus: int = 8, engine: dict[str, Any] | None = None, job: dict[str, Any] | None = None, **rest: Any
) -> Job:
    """Trainer and SGLang engine on the same devices."""
    settings = {"engine": "sglang", "gpus_per_engine": 4, "tp": 4, **(engine or {})}
    return replace(megatron(gpus=gpus, **rest), engine=EngineLayout(**settings), **(job or {}))


def shape(model: str, **changes: Any) -> ModelShape:
    """A catalogue model with other sizes."""
    return replace(model_shape(model), **changes)


PLACEMENT = [
    Planted("sizes-positive", megatron(ep=0, tp=-2, sequence_parallel=False), "tp -2 → 1, ep 0 → 1"),
    Planted("node-devices", replace(megatron(DENSE), nodes=1, gpus_per_node=16), "nodes 1 → 2, gpus_per_node 16 → 8"),
    Planted("rollout-share", together(job={"colocated": False, "rollout_gpus": 8}), "rollout_gpus 8 → 4"),
    Planted("rollout-share-colocated", together(job={"rollout_gpus": 4}), "rollout_gpus 4 → 0"),
    Planted(
        "engine-pool",
        serving("sglang", tp=6, gpus_per_engine=6, model=shape(MOE, num_heads=36, num_kv_heads=6)),
        "engine gpus_per_engine 6 → 2, engine tp 6 → 2; or engine gpus_per_engine 6 → 1, engine tp 6 → 1",
    ),
    Planted("tensor-fast-links", megatron(shape(DENSE, num_heads=48), 48, tp=16, device="h200"), "tp 16 → 8 or 4"),
    Planted(
        "engine-fast-links",
        serving("sglang", gpus=16, tp=16),
        "engine gpus_per_engine 16 → 8, engine tp 16 → 8; or engine gpus_per_engine 16 → 4, engine tp 16 → 4",
    ),
]

GRIDS = [
    Planted("dense-grid", megatron(gpus=32, tp=4, pp=4, cp=4, etp=1), "cp 4 → 2 or 1"),
    Planted(
        "expert-grid",
        megatron("glm-4_7-flash", 4, "mi355x", tp=2, pp=2, ep=4, etp=1, last_stage_layers=23),
        "ep 4 → 2 or 1",
    ),
    Planted("no-experts", megatron(DENSE, ep=2), "ep 2 → 1"),
    Planted(
        "rank-order",
        megatron(DENSE, cp=2, switches={"rank_order": "tp-dp-pp"}),
        "rank_order tp-dp-pp → tp-cp-ep-dp-pp",
    ),
    Planted(
        "pipeline-groups",
        megatron(gpus=16, tp=2, pp=2, ep=4, etp=1, switches={"rank_order": "tp-cp-ep-pp-dp"}),
        "rank_order tp-cp-ep-pp-dp → tp-cp-ep-dp-pp",
    ),
    Planted(
        "optimizer-instances", megatron(DENSE, 6, switches={"optimizer_instances": 4}), "optimizer_instances 4 → 3 or 2"
    ),
    Planted("heads-tp", megatron(shape(MOE, num_heads=20), tp=8, etp=1), "tp 8 → 4 or 2"),
    Planted("kv-heads-tp", megatron(shape(DENSE, num_kv_heads=3), 6, tp=2), "tp 2 → 1"),
    Planted("inkling-heads-tp", megatron("inkling", 16, "gb300", tp=16, etp=1), "tp 16 → 8 or 4"),
    Planted("output-groups-tp", megatron(V4, 16, "gb300", tp=16, etp=1), "tp 16 → 8 or 4"),
    Planted("deepseek-v4-sizes", megatron(shape(V4, head_dim=256), switches={"implementation": "miles"}), ""),
    Planted("hidden-tp", megatron(shape(GLM, hidden=6146), tp=4, etp=1), "tp 4 → 2 or 1"),
    Planted("hidden-tp-uneven", megatron(shape(DENSE, hidden=2562), tp=4), "tp 4 → 2 or 1"),
    Planted("ffn-tp", megatron(shape(DENSE, ffn=9730), tp=4), "tp 4 → 2 or 1"),
    Planted(
        "shared-ffn-tp", megatron(shape("glm-4_7-flash", moe_ffn=1538, num_heads=64), tp=4, etp=1), "tp 4 → 2 or 1"
    ),
    Planted("expert-ffn-etp", megatron(gpus=10, etp=5), "etp 5 → 2 or 1"),
    Planted(
        "vocabulary-given",
        megatron(DENSE, tp=8, switches={"padded_vocab": 151940}),
        "padded_vocab 151940 → 151944 or 151952",
    ),
    Planted("vocabulary-padding", megatron(GLM, tp=8, etp=1), "vocab_divisor 128 → 32 or 16"),
]

EXPERTS = [
    Planted("experts-ep", megatron(V4, 48, ep=48, etp=1), "ep 48 → 16 or 8"),
    Planted("sequence-parallel-moe", megatron(tp=2, etp=1, sequence_parallel=False), "sequence_parallel off → on"),
    Planted(
        "moe-dispatcher", megatron(moe_dispatcher="alltoall_seq"), "moe_dispatcher alltoall_seq → alltoall or allgather"
    ),
    Planted("dispatcher-ranks", megatron(moe_dispatcher="deepep"), "moe_dispatcher deepep → flex or allgather"),
    Planted(
        "dispatcher-padding",
        megatron(ep=2, moe_dispatcher="flex", switches={"moe_flex_backend": "deepep", "moe_pad_to_capacity": True}),
        "moe_pad_to_capacity on → off",
    ),
    Planted(
        "dispatcher-probabilities",
        megatron(ep=2, moe_dispatcher="flex", switches={"moe_flex_backend": "deepep", "moe_router_dtype": "bf16"}),
        "moe_router_dtype bf16 → fp32 or unset",
    ),
    Planted(
        "dispatcher-capacity",
        megatron(moe_dispatcher="alltoall", switches={"moe_rank_capacity_factor": 1.5}),
        "moe_rank_capacity_factor 1.5 → unset",
    ),
    Planted(
        "shared-expert-overlap",
        megatron(V4, moe_dispatcher="allgather", switches={"moe_shared_expert_overlap": True}),
        "moe_dispatcher allgather → alltoall or flex",
    ),
    Planted(
        "grouped-gemm",
        megatron(memory={"fp8": "delayed"}, switches={"moe_grouped_gemm": True, "te_version": (1, 10)}),
        "moe_grouped_gemm on → off",
    ),
    Planted("expert-bias", megatron(switches={"moe_expert_bias": True}), "moe_expert_bias on → off"),
    Planted("expert-linear-bias", megatron(tp=2, switches={"moe_linear_bias": True}), "moe_linear_bias on → off"),
    Planted("single-expert-softmax", megatron(shape(MOE, experts_per_token=1)), "moe_pre_softmax off → on"),
    Planted("expert-overlap", megatron(pp=4, ep=2, switches={"ep_a2a_overlap": True}), "virtual_stages unset → 2 or 3"),
]

PIPELINE = [
    Planted(
        "pipeline-spelling",
        megatron(DENSE, pp=2, first_stage_layers=18, stage_layers=(18, 18)),
        "first_stage_layers 18 → unset, stage_layers 18,18 → unset; or "
        "first_stage_layers 18 → unset, last_stage_layers unset → 18, stage_layers 18,18 → unset",
    ),
    Planted(
        "virtual-spelling",
        megatron(DENSE, pp=2, virtual_stages=2, switches={"layers_per_virtual_stage": 9}),
        "layers_per_virtual_stage 9 → unset; or virtual_stages 2 → unset",
    ),
    Planted("pipeline-even", megatron(V4, pp=4), "last_stage_layers unset → 10; or first_stage_layers unset → 10"),
    Planted(
        "pipeline-ends",
        megatron("inkling-small", pp=8, first_stage_layers=5, last_stage_layers=5),
        "first_stage_layers 5 → 6, last_stage_layers 5 → 6; or first_stage_layers 5 → 7, last_stage_layers 5 → unset",
    ),
    Planted("pipeline-ends-single", megatron(DENSE, first_stage_layers=36), "first_stage_layers 36 → unset"),
    Planted(
        "pipeline-accounting",
        megatron(shape(DENSE, num_layers=42), pp=4, account_for_loss=True),
        "account_for_embedding off → on",
    ),
    Planted(
        "pipeline-stages",
        megatron(V4, pp=8, stage_layers=(6, 6, 6, 5, 5, 5, 5, 6)),
        "stage_layers 6,6,6,5,5,5,5,6 → 6,6,6,5,5,5,5,5",
    ),
    Planted(
        "pipeline-string",
        megatron(V4, pp=8, switches={"pipeline_layout": "Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5"}),
        "pipeline_layout Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5 → Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5L",
    ),
    Planted(
        "interleaved-schedule",
        megatron(DENSE, pp=4, virtual_stages=3, batch={"num_prompts": 12, "group_size": 1, "micro_batch": 1}),
        "microbatch_group unset → 6",
    ),
    Planted(
        "indexer-stage-start",
        megatron(GLM, pp=4, first_stage_layers=19, last_stage_layers=19),
        "first_stage_layers 19 → 18, last_stage_layers 19 → unset; or "
        "first_stage_layers 19 → 18, last_stage_layers 19 → 20",
    ),
    Planted(
        "hyper-connections",
        megatron(shape(V4, mtp_layers=0), pp=4, last_stage_layers=10, switches={"implementation": "upstream"}),
        "implementation upstream → verl or miles",
    ),
    Planted(
        "hash-layers-stage",
        megatron(V4, pp=4, first_stage_layers=1),
        "first_stage_layers 1 → 3, last_stage_layers unset → 14; or "
        "first_stage_layers 1 → 3, last_stage_layers unset → 12",
    ),
]

CONTEXT = [
    Planted(
        "cp-comm-type", megatron(DENSE, cp=2, cp_comm_type="allgather"), "cp_comm_type allgather → all_gather or a2a"
    ),
    Planted("cp-heads", megatron(tp=2, cp=4, etp=1, cp_comm_type="a2a"), "cp 4 → 2 or 1"),
    Planted(
        "cp-hierarchy",
        megatron(DENSE, cp=8, cp_comm_type="a2a+p2p", switches={"cp_hierarchy": (2, 2)}),
        "cp_hierarchy 2,2 → 4,2 or 2,4",
    ),
    Planted(
        "cp-window",
        megatron(shape(DENSE, sliding_window=128), cp=2, cp_comm_type="p2p"),
        "cp_comm_type p2p → a2a or all_gather",
    ),
    Planted(
        "cp-sinks",
        megatron(shape(DENSE, attention_sinks=True), cp=2, cp_comm_type="all_gather"),
        "cp_comm_type all_gather → a2a",
    ),
    Planted("cp-sparse", megatron(GLM, cp=2, cp_comm_type="p2p"), "cp_comm_type p2p → all_gather"),
    Planted("deepseek-v4-cp", megatron(V4, cp=2), "cp_partition unset → contiguous"),
    Planted("inkling-cp", megatron("inkling-small", cp=2), "cp_partition unset → contiguous"),
    Planted("hybrid-cp", megatron(DENSE, pp=2, cp=2, switches={"hybrid_cp": True}), "hybrid_cp on → off"),
    Planted("mla-settings", megatron(GLM, switches={"group_query_attention": True}), "group_query_attention on → off"),
    Planted("sequence-multiple", megatron(DENSE, tp=4, cp=2, batch={"pad_multiple": 8}), "pad_multiple 8 → 16"),
    Planted(
        "indexer-replay-cp", megatron(GLM, cp=2, cp_partition="contiguous", job={"indexer_replay": True}), "cp 2 → 1"
    ),
    Planted("indexer-replay-model", megatron(DENSE, job={"indexer_replay": True}), "indexer_replay on → off"),
    Planted("routing-replay-model", megatron(DENSE, job={"routing_replay": True}), "routing_replay on → off"),
]

MEMORY = [
    Planted("fp8-blocks", megatron(tp=4, memory={"fp8": "blockwise"}), "etp unset → 1, ep 1 → 4"),
    Planted(
        "fp8-dispatcher",
        megatron(moe_dispatcher="allgather", memory={"fp8": "mxfp8"}),
        "moe_dispatcher allgather → alltoall or flex",
    ),
    Planted(
        "optimizer-offload", megatron(memory={"optimizer_offload_fraction": 0.75}), "precision_aware_optimizer off → on"
    ),
    Planted(
        "offload-fraction",
        megatron(memory={"optimizer_offload_fraction": 1.5, "precision_aware_optimizer": True}),
        "optimizer_offload_fraction 1.5 → 0.0",
    ),
    Planted(
        "precision-aware",
        megatron(memory={"precision_aware_optimizer": True, "distributed_optimizer": False}),
        "distributed_optimizer off → on",
    ),
    Planted("state-dtypes", megatron(memory={"moment_dtype": "bf16"}), "precision_aware_optimizer off → on"),
    Planted(
        "fp8-gather-offload",
        megatron(
            memory={
                "fp8": "blockwise",
                "fp8_param_gather": True,
                "optimizer_offload_fraction": 0.5,
                "precision_aware_optimizer": True,
            }
        ),
        "fp8_param_gather on → off",
    ),
    Planted("fp8-gather", megatron(memory={"fp8_param_gather": True}), "fp8_param_gather on → off"),
    Planted("param-gather-overlap", megatron(memory={"overlap_param_gather": True}), "overlap_grad_reduce off → on"),
    Planted(
        "recompute-settings",
        megatron(memory={"recompute": "full"}),
        "recompute_method unset → uniform, recompute_num_layers unset → 1",
    ),
    Planted("activation-offload", megatron(pp=2, memory={"offload_activations": True}), "offload_activations on → off"),
    Planted(
        "offload-apart",
        together(gpus=8, memory={"offload_weights": True}, job={"colocated": False, "rollout_gpus": 4}),
        "offload_weights on → off",
    ),
    Planted("rematerialised-weights", megatron(memory={"rematerialise_weights": True}), "offload_weights off → on"),
    Planted(
        "streamed-optimizer",
        megatron(
            memory={
                "stream_optimizer": True,
                "optimizer_offload_fraction": 1.0,
                "precision_aware_optimizer": True,
            }
        ),
        "optimizer_offload_fraction 1.0 → 0.0, precision_aware_optimizer on → off",
    ),
    Planted("offload-target", megatron(memory={"offload_target": "disk"}), "offload_weights off → on"),
]

SWITCHES = [
    Planted("sequence-parallel-alone", megatron(sequence_parallel=True), "sequence_parallel on → off"),
    Planted(
        "tensor-overlap",
        megatron(DENSE, tp=2, sequence_parallel=False, switches={"tp_comm_overlap": True}),
        "sequence_parallel off → on",
    ),
    Planted(
        "saved-activations",
        megatron(tp=2, etp=1, switches={"distribute_saved_activations": True}),
        "distribute_saved_activations on → off",
    ),
    Planted(
        "torch-fsdp2",
        megatron(ep=8, switches={"torch_fsdp2": True}, memory={"distributed_optimizer": False}),
        "torch_fsdp2 on → off, megatron_fsdp off → on",
    ),
    Planted("packing-micro-batch", megatron(DENSE, batch={"micro_batch": 2}), "micro_batch 2 → 1"),
    Planted(
        "device-connections",
        megatron(DENSE, tp=4, job={"environment": {"trainer": {}}}),
        "trainer CUDA_DEVICE_MAX_CONNECTIONS unset → 1",
    ),
]

FSDP = [
    Planted("fsdp-replicate", fsdp(replicate=3), "replicate 3 → 2 or 4"),
    Planted("fsdp-ulysses", fsdp(gpus=8, ulysses=3), "ulysses 3 → 2 or 4"),
    Planted(
        "fsdp-ulysses-packing",
        fsdp(gpus=8, ulysses=4, batch={"packing": False}),
        "packing off → on",
    ),
    Planted("fsdp-cp", fsdp(cp=2), "cp 2 → 1"),
    Planted("fsdp-axes", fsdp(tp=2), "tp 2 → 1; or backend fsdp → megatron"),
    Planted("fsdp-no-experts", fsdp(ep=2), "ep 2 → 1"),
    Planted("fsdp-experts", fsdp(MOE, replicate=4, ep=4), "ep 4 → 2 or 1"),
]

ENGINES = [
    Planted("engine-size", serving("vllm", tp=4), "engine gpus_per_engine 8 → 4"),
    Planted("embedded-engine", serving("torch", DENSE, gpus=2, tp=2), "engine gpus_per_engine 2 → 1, engine tp 2 → 1"),
    Planted(
        "engine-heads",
        serving("vllm", "glm-4_7-flash", gpus=8, tp=8),
        "engine gpus_per_engine 8 → 4, engine tp 8 → 4; or engine gpus_per_engine 8 → 2, engine tp 8 → 2",
    ),
    Planted(
        "engine-kv-heads",
        serving("sglang", shape(DENSE, num_kv_heads=3), gpus=2, tp=2),
        "engine gpus_per_engine 2 → 1, engine tp 2 → 1",
    ),
    Planted(
        "engine-output-groups",
        serving("sglang", V4, gpus=16, device="gb300", tp=16),
        "engine gpus_per_engine 16 → 8, engine tp 16 → 8; or engine gpus_per_engine 16 → 4, engine tp 16 → 4",
    ),
    Planted("engine-no-experts", serving("vllm", DENSE, tp=8, ep=8), "engine ep 8 → 1"),
    Planted("engine-ffn", serving("vllm", shape(MOE, moe_ffn=772), tp=8), "engine ep 1 → 8"),
    Planted("engine-fp8-blocks", serving("sglang", gpus=4, tp=4, quantisation="fp8"), "engine ep 1 → 2 or 4"),
    Planted("engine-a2a-dense", serving("sglang", DENSE, tp=8, moe_a2a="deepep"), "engine moe_a2a deepep → unset"),
    Planted(
        "engine-memory-fraction",
        serving("sglang", tp=8, memory_fraction=85.0),
        "engine memory_fraction 85.0 → 0.9 or 0.5",
    ),
    Planted(
        "paused-all-reduce",
        together(device="mi355x", engine={"custom_all_reduce": True}),
        "engine custom_all_reduce on → off",
    ),
    Planted(
        "expandable-segments",
        serving(
            "sglang",
            tp=8,
            device="mi300x",
            job={"environment": {"engine": {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}}},
        ),
        "engine PYTORCH_HIP_ALLOC_CONF expandable_segments:True → unset",
    ),
    Planted(
        "rocm-fp8-cache",
        serving("vllm", GLM, tp=8, ep=8, device="mi300x", kv_cache_dtype="fp8"),
        "engine kv_cache_dtype fp8 → bf16",
    ),
    Planted("vllm-expert-size", serving("vllm", tp=8, ep=4), "engine ep 4 → 1 or 8"),
    Planted("vllm-balancer", serving("vllm", tp=8, expert_balancer=True), "engine expert_balancer on → off"),
    Planted("vllm-decode-cp", serving("vllm", tp=8, decode_cp=3), "engine decode_cp 3 → 2 or 4"),
    Planted("vllm-prefill-cp", serving("vllm", tp=2, dp=2, prefill_cp=2), "engine prefill_cp 2 → 1, engine dp 2 → 4"),
    Planted("vllm-elastic", serving("vllm", tp=4, pp=2, elastic_ep=True), "engine elastic_ep on → off"),
    Planted(
        "vllm-a2a",
        serving("vllm", device="mi355x", dp=8, ep=8, moe_a2a="deepep_low_latency"),
        "engine moe_a2a deepep_low_latency → mori_low_latency or unset",
    ),
    Planted(
        "vllm-a2a-removed",
        serving("vllm", dp=8, ep=8, moe_a2a="pplx"),
        "engine moe_a2a pplx → deepep_high_throughput or unset",
    ),
    Planted(
        "vllm-a2a-inert",
        serving("vllm", tp=8, ep=8, moe_a2a="deepep_low_latency"),
        "engine moe_a2a deepep_low_latency → unset",
    ),
    Planted("vllm-block-size", serving("vllm", V4, tp=8, page_tokens=64), "engine page_tokens 64 → 256"),
    Planted(
        "sglang-experts", serving("sglang", shape(MOE, num_experts=126), gpus=4, tp=4, ep=4), "engine ep 4 → 2 or 1"
    ),
    Planted("sglang-expert-size", serving("sglang", tp=8, ep=2, moe_dp=2), "engine ep 2 → 1 or 4"),
    Planted("sglang-a2a-ep", serving("sglang", tp=8, ep=4, moe_a2a="deepep"), "engine ep 4 → 8"),
    Planted(
        "sglang-a2a",
        serving("sglang", device="mi355x", tp=8, ep=8, moe_a2a="deepep"),
        "engine moe_a2a deepep → mori or unset",
    ),
    Planted(
        "sglang-a2a-dp",
        serving("sglang", tp=8, ep=8, moe_a2a="flashinfer"),
        "engine dp 1 → 8, engine dp_attention off → on",
    ),
    Planted(
        "sglang-deepep-graphs",
        serving("sglang", tp=8, ep=8, moe_a2a="deepep", deepep_mode="normal", cuda_graphs=True),
        "engine cuda_graphs on → off",
    ),
    Planted(
        "sglang-mori-chunk",
        serving("sglang", device="mi355x", tp=8, ep=8, moe_a2a="mori", chunked_prefill_tokens=8192),
        "engine chunked_prefill_tokens 8192 → 4096",
    ),
    Planted(
        "sglang-chunk-pages",
        serving("sglang", tp=8, page_tokens=64, chunked_prefill_tokens=2000),
        "engine chunked_prefill_tokens 2000 → 1984 or 2048",
    ),
    Planted("sglang-dp-attention", serving("sglang", tp=8, dp=3, dp_attention=True), "engine dp 3 → 2 or 4"),
    Planted("sglang-dp-attention-alone", serving("sglang", tp=8, dp_attention=True), "engine dp_attention on → off"),
    Planted(
        "sglang-nodes",
        serving(
            "sglang",
            shape(MOE, num_heads=36, num_kv_heads=6),
            gpus=6,
            tp=3,
            gpus_per_engine=3,
            job={"nodes": 3, "gpus_per_node": 2},
        ),
        "engine gpus_per_engine 3 → 2, engine tp 3 → 2; or engine gpus_per_engine 3 → 1, engine tp 3 → 1",
        also=("engine-fast-links",),
    ),
    Planted(
        "sglang-nodes-dp", serving("sglang", gpus=16, tp=8, dp=2), "engine dp_attention off → on, engine tp 8 → 16"
    ),
    Planted("sglang-dense-tp", serving("sglang", tp=8, moe_dense_tp=4), "engine moe_dense_tp 4 → 1 or unset"),
    Planted(
        "sglang-pipeline-speculation", serving("sglang", tp=4, pp=2, speculative=True), "engine speculative on → off"
    ),
    Planted("sglang-runner", serving("sglang", tp=8, ep=4, moe_runner="flashinfer_cutlass"), "engine ep 4 → 1 or 8"),
    Planted(
        "sglang-deepep-v2",
        serving("sglang", tp=8, ep=8, moe_a2a="deepep_v2", moe_runner="triton"),
        "engine moe_runner triton → deep_gemm",
    ),
    Planted(
        "sglang-attention-backend",
        serving("sglang", tp=8, device="gb300", attention_backend="fa3"),
        "engine attention_backend fa3 → unset",
    ),
]

BATCH = [
    Planted(
        "batch-steps", megatron(DENSE, batch={"global_batch": 32}), "global_batch 32 → 64; or optimizer_steps 1 → 2"
    ),
    Planted("batch-ranks", megatron(DENSE, batch={"num_prompts": 1, "group_size": 4}), "num_prompts 1 → 2 or 4"),
    Planted(
        "batch-split",
        megatron(DENSE, 10, batch={"num_prompts": 12, "group_size": 8, "micro_batch": 1}),
        "num_prompts 12 → 10 or 15",
    ),
    Planted("batch-uneven", fsdp(batch={"num_prompts": 9, "group_size": 1}), "num_prompts 9 → 8 or 16"),
    Planted("sample-length", megatron(DENSE, batch={"max_tokens_per_gpu": 2048, "response_tokens": 8192}), ""),
    Planted(
        "sample-length",
        megatron(DENSE, batch={"max_tokens_per_gpu": 9000, "response_tokens": 8192, "packing": False}),
        "",
    ),
    Planted(
        "async-colocated",
        together(job={"fully_async": True}),
        "colocated on → off, rollout_gpus 0 → 4; or fully_async on → off",
    ),
    Planted(
        "async-partial",
        together(job={"colocated": False, "rollout_gpus": 4, "fully_async": True, "partial_rollout": True}),
        "partial_rollout on → off",
    ),
    Planted(
        "async-pause",
        together(job={"colocated": False, "rollout_gpus": 4, "fully_async": True, "pause_mode": "abort"}),
        "pause_mode abort → retract or in_place",
    ),
    Planted("async-engine", replace(serving("torch", DENSE, gpus=1), fully_async=True), "fully_async on → off"),
    Planted(
        "staleness-steps",
        megatron(DENSE, batch={"optimizer_steps": 2}, job={"max_staleness": 1}),
        "optimizer_steps 2 → 1",
    ),
]

PLANTED = [*PLACEMENT, *GRIDS, *EXPERTS, *PIPELINE, *CONTEXT, *MEMORY, *SWITCHES, *FSDP, *ENGINES, *BATCH]
