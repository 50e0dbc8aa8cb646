"""Rules of vLLM's own axes and back ends."""

from __future__ import annotations

from lockstep.topology.records import Job
from lockstep.topology.rules import Changes, engine_of, rule
from lockstep.topology.rules_rollout import VLLM_PARALLEL, expert_sizes, no_back_end, vendor_problem

VLLM_A2A_CUDA = (
    *("deepep_high_throughput", "deepep_low_latency", "deepep_v2", "nixl_ep"),
    *("flashinfer_nvlink_one_sided", "flashinfer_nvlink_two_sided"),
)
VLLM_A2A_ROCM = ("mori_high_throughput", "mori_low_latency")
_A2A_DEFAULT = "allgather_reducescatter"
_A2A_REMOVED = ("naive", "pplx")


@rule(
    "vllm-expert-size",
    source=f"{VLLM_PARALLEL}; vLLM layers/fused_moe/config.py: FusedMoEParallelConfig.make",
    needs="vllm moe",
    knobs=(expert_sizes,),
)
def vllm_expert_size(job: Job) -> str | None:
    """vLLM's expert parallelism has no size of its own: it is all ranks, tp · prefill_cp · dp, or off."""
    engine = engine_of(job)
    whole = engine.tp * engine.prefill_cp * engine.dp
    if engine.ep in (1, whole):
        return None
    how = f"tp {engine.tp} · prefill_cp {engine.prefill_cp} · dp {engine.dp}"
    return f"engine ep {engine.ep}: vLLM takes {how} = {whole}, or 1"


@rule("vllm-balancer", source=f"{VLLM_PARALLEL} (enable_eplb)", needs="vllm", knobs=("engine.expert_balancer",))
def vllm_balancer(job: Job) -> str | None:
    """vLLM's expert balancing needs expert parallelism over more than one rank."""
    engine = engine_of(job)
    return f"expert_balancer with engine ep {engine.ep}" if engine.expert_balancer and engine.ep == 1 else None


@rule("vllm-decode-cp", source=VLLM_PARALLEL, needs="vllm", knobs=("engine.decode_cp",))
def vllm_decode_cp(job: Job) -> str | None:
    """vLLM's decode context parallelism reuses tensor-parallel ranks: it divides tp."""
    engine = engine_of(job)
    return (
        f"decode_cp {engine.decode_cp} does not divide engine tp {engine.tp}" if engine.tp % engine.decode_cp else None
    )


def prefill_as_data(job: Job) -> list[Changes]:
    """The same ranks without prefill context parallelism."""
    engine = engine_of(job)
    return [(("engine.prefill_cp", 1), ("engine.dp", engine.dp * engine.prefill_cp))]


@rule("vllm-prefill-cp", source=VLLM_PARALLEL, needs="vllm", knobs=(prefill_as_data,))
def vllm_prefill_cp(job: Job) -> str | None:
    """vLLM's prefill context parallelism excludes data parallelism."""
    engine = engine_of(job)
    return f"prefill_cp {engine.prefill_cp} with dp {engine.dp}" if engine.prefill_cp > 1 and engine.dp > 1 else None


@rule("vllm-elastic", source=VLLM_PARALLEL, needs="vllm", knobs=("engine.elastic_ep",))
def vllm_elastic(job: Job) -> str | None:
    """vLLM's elastic expert parallelism excludes pipelines."""
    engine = engine_of(job)
    return f"elastic_ep with engine pp {engine.pp}" if engine.elastic_ep and engine.pp > 1 else None


def vllm_back_ends(job: Job) -> list[Changes]:
    """This vendor's counterpart of the back end, then the default."""
    name, amd = engine_of(job).moe_a2a or "", job.hardware.vendor == "amd"
    prefix = "mori" if amd else "deepep"
    suffix = "low_latency" if "low_latency" in name else "high_throughput"
    return [(("engine.moe_a2a", f"{prefix}_{suffix}"),), (("engine.moe_a2a", None),)]


@rule("vllm-a2a", source=f"{VLLM_PARALLEL} (all2all_backend)", needs="vllm moe", knobs=(vllm_back_ends,))
def vllm_a2a(job: Job) -> str | None:
    """vLLM's all-to-all back end exists, and for this vendor's devices."""
    name, vendor = engine_of(job).moe_a2a, job.hardware.vendor
    if name in (None, "none", _A2A_DEFAULT, *_A2A_REMOVED):
        return None
    return vendor_problem("vLLM", str(name), vendor, VLLM_A2A_CUDA, VLLM_A2A_ROCM)


@rule(
    "vllm-a2a-removed",
    severity="warning",
    source=f"{VLLM_PARALLEL} (all2all_backend)",
    needs="vllm moe",
    knobs=(vllm_back_ends,),
)
def vllm_a2a_removed(job: Job) -> str | None:
    """The back ends naive and pplx were removed from vLLM, which falls back with a warning."""
    name = engine_of(job).moe_a2a
    return f"all-to-all back end {name} was removed from vLLM: {_A2A_DEFAULT} is used" if name in _A2A_REMOVED else None


@rule(
    "vllm-a2a-inert",
    severity="warning",
    source=f"{VLLM_PARALLEL} (all2all_backend)",
    needs="vllm moe",
    knobs=(no_back_end,),
)
def vllm_a2a_inert(job: Job) -> str | None:
    """vLLM's all-to-all back end acts only with data parallelism and expert parallelism."""
    engine = engine_of(job)
    if engine.moe_a2a in (None, "none", _A2A_DEFAULT, *_A2A_REMOVED) or (engine.dp > 1 and engine.ep > 1):
        return None
    return f"all-to-all back end {engine.moe_a2a} with dp {engine.dp}, ep {engine.ep} has no effect"


@rule(
    "vllm-block-size",
    source="vLLM vllm/model_executor/models/deepseek_v4.py (block size 256)",
    needs="vllm",
    knobs=("engine.page_tokens",),
)
def vllm_block_size(job: Job) -> str | None:
    """vLLM serves DeepSeek-V4 with cache blocks of 256 tokens."""
    size = engine_of(job).page_tokens
    if job.model.attention != "deepseek_v4" or size in (None, 256):
        return None
    return f"page_tokens {size} for DeepSeek-V4 in vLLM: it is 256"
