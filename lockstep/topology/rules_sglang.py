"""Rules of SGLang's own axes and back ends."""

from __future__ import annotations

from lockstep.topology.records import Job
from lockstep.topology.rules import Changes, engine_of, rule
from lockstep.topology.rules_placement import engine_scale
from lockstep.topology.rules_rollout import (
    SGLANG,
    SGLANG_A2A_CUDA,
    SGLANG_A2A_OTHER,
    expert_size,
    expert_sizes,
    no_back_end,
    vendor_problem,
)

_ATTENTION: dict[str, tuple[int, int, str]] = {
    "fa3": (80, 90, "it needs sm80 to sm90"),
    "trtllm_mha": (90, 999, "it needs Hopper or Blackwell"),
    "trtllm_mla": (100, 999, "it needs Blackwell"),
    "cutedsl_mla": (100, 999, "it needs Blackwell"),
    "tokenspeed_mla": (100, 999, "it needs Blackwell"),
}
"""Attention back ends that SGLang starts on some devices only: the least and the largest compute capability."""


@rule(
    "sglang-experts",
    source="SGLang layers/moe/fused_moe_triton/layer.py: FusedMoE.__init__",
    needs="sglang moe",
    knobs=(expert_sizes,),
)
def sglang_experts(job: Job) -> str | None:
    """SGLang's experts divide by ep."""
    ep, experts = expert_size(engine_of(job)), job.model.num_experts
    return f"{experts} experts do not divide by engine ep {ep}" if experts % ep else None


@rule("sglang-expert-size", source=SGLANG, needs="sglang moe", knobs=(expert_sizes, "engine.moe_dp"))
def sglang_expert_size(job: Job) -> str | None:
    """SGLang's ep · moe_dp divides tp, and is tp where both are above 1."""
    engine, ep = engine_of(job), expert_size(engine_of(job))
    product = ep * engine.moe_dp
    if engine.tp % product:
        return f"engine ep {ep} · moe_dp {engine.moe_dp} = {product} does not divide engine tp {engine.tp}"
    if ep > 1 and engine.moe_dp > 1 and product != engine.tp:
        return (
            f"engine ep {ep} · moe_dp {engine.moe_dp} = {product} must be engine tp {engine.tp} where both are above 1"
        )
    return None


def whole_experts(job: Job) -> list[Changes]:
    """ep as large as tp: what the back end does anyway."""
    return [(("engine.ep", engine_of(job).tp),)]


@rule(
    "sglang-a2a-ep",
    severity="warning",
    source=f"{SGLANG} (moe_a2a_backend)",
    needs="sglang moe",
    knobs=(whole_experts, no_back_end),
)
def sglang_a2a_ep(job: Job) -> str | None:
    """SGLang's all-to-all back ends set ep to tp without a word: state it."""
    engine = engine_of(job)
    if expert_size(engine) == engine.ep:
        return None
    return f"all-to-all back end {engine.moe_a2a} silently sets engine ep {engine.ep} to tp {engine.tp}"


def sglang_back_ends(job: Job) -> list[Changes]:
    """This vendor's usual back end, then none."""
    return [(("engine.moe_a2a", "mori" if job.hardware.vendor == "amd" else "deepep"),), (("engine.moe_a2a", None),)]


@rule("sglang-a2a", source=f"{SGLANG} (moe_a2a_backend)", needs="sglang moe", knobs=(sglang_back_ends,))
def sglang_a2a(job: Job) -> str | None:
    """SGLang's all-to-all back end exists, and for this vendor's devices."""
    name = engine_of(job).moe_a2a
    if name in (None, "none"):
        return None
    return vendor_problem("SGLang", str(name), job.hardware.vendor, SGLANG_A2A_CUDA, SGLANG_A2A_OTHER[:1])


def back_end_ranks(job: Job) -> list[Changes]:
    """Data-parallel attention over as many ranks as the back end needs."""
    engine = engine_of(job)
    sizes = (engine.tp,) if engine.moe_a2a == "flashinfer" else (2, engine.tp)
    return [(("engine.dp", size), ("engine.dp_attention", True)) for size in sizes]


@rule("sglang-a2a-dp", source=f"{SGLANG} (moe_a2a_backend)", needs="sglang moe", knobs=(back_end_ranks, no_back_end))
def sglang_a2a_dp(job: Job) -> str | None:
    """SGLang's back end flashinfer needs dp equal to tp, pplx dp of at least 2."""
    engine = engine_of(job)
    if engine.moe_a2a == "flashinfer" and engine.dp != engine.tp:
        return f"all-to-all back end flashinfer with dp {engine.dp}: it needs dp = tp {engine.tp}"
    if engine.moe_a2a == "pplx" and engine.dp < 2:
        return f"all-to-all back end pplx with dp {engine.dp}: it needs 2 or more"
    return None


@rule(
    "sglang-deepep-graphs",
    source=f"{SGLANG} (deepep_mode)",
    needs="sglang moe",
    knobs=("engine.cuda_graphs", "engine.deepep_mode"),
)
def sglang_deepep_graphs(job: Job) -> str | None:
    """SGLang captures no graphs with deepep in normal mode."""
    engine = engine_of(job)
    if engine.moe_a2a != "deepep" or engine.deepep_mode != "normal" or not engine.cuda_graphs:
        return None
    return "cuda_graphs with deepep_mode normal"


MORI_CHUNK = 4096
"""Tokens of a prefill chunk per rank that SGLang's mori back end dispatches by default."""
MORI_VARIABLE = "SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK"


def mori_chunk(job: Job) -> int:
    """What mori dispatches per rank: the engine's variable, or the default."""
    stated = job.environment.get("engine", {}).get(MORI_VARIABLE, "")
    return int(stated) if stated.isdecimal() else MORI_CHUNK


def smaller_chunks(job: Job) -> list[Changes]:
    """The largest chunk that mori dispatches."""
    ranks = engine_of(job).dp if engine_of(job).dp_attention else 1
    return [(("engine.chunked_prefill_tokens", mori_chunk(job) * ranks),)]


@rule("sglang-mori-chunk", source=f"{SGLANG} (mori)", needs="sglang moe", knobs=(smaller_chunks,))
def sglang_mori_chunk(job: Job) -> str | None:
    """A prefill chunk of a rank is at most what SGLang's mori back end dispatches."""
    engine = engine_of(job)
    chunk = _rank_chunk(job)
    if engine.moe_a2a != "mori" or chunk is None or chunk <= mori_chunk(job):
        return None
    return f"a prefill chunk of {chunk} tokens a rank with mori, which dispatches {mori_chunk(job)}"


def _rank_chunk(job: Job) -> int | None:
    """Tokens of a prefill chunk per rank: DP attention divides it."""
    engine = engine_of(job)
    if engine.chunked_prefill_tokens is None or engine.chunked_prefill_tokens < 1:
        return None
    return engine.chunked_prefill_tokens // (engine.dp if engine.dp_attention else 1)


def whole_pages(job: Job) -> list[Changes]:
    """Chunks of whole pages, the nearest first."""
    engine = engine_of(job)
    unit = (engine.page_tokens or 1) * (engine.dp if engine.dp_attention else 1)
    below = (engine.chunked_prefill_tokens or 0) // unit * unit
    return [(("engine.chunked_prefill_tokens", size),) for size in (below, below + unit) if size]


@rule("sglang-chunk-pages", source=SGLANG, needs="sglang", knobs=(whole_pages,))
def sglang_chunk_pages(job: Job) -> str | None:
    """A prefill chunk of SGLang, after DP attention has divided it, is a whole number of cache pages."""
    page, chunk = engine_of(job).page_tokens, _rank_chunk(job)
    if page is None or chunk is None or (chunk % page == 0 and chunk >= page):
        return None
    return f"a prefill chunk of {chunk} tokens a rank is no multiple of page_tokens {page}"


def attention_groups(job: Job) -> list[Changes]:
    """Sizes of DP attention that divide tp."""
    engine = engine_of(job)
    sizes = [dp for dp in range(1, engine.tp + 1) if engine.tp % (dp * engine.attention_cp) == 0]
    return [(("engine.dp", dp),) for dp in sorted(sizes, key=lambda dp: (abs(dp - engine.dp), dp))]


@rule(
    "sglang-dp-attention",
    source=f"{SGLANG} (enable_dp_attention)",
    needs="sglang",
    knobs=(attention_groups, "engine.attention_cp"),
)
def sglang_dp_attention(job: Job) -> str | None:
    """Under DP attention SGLang's tp divides by dp; always, by attention_cp."""
    engine = engine_of(job)
    dp = engine.dp if engine.dp_attention else 1
    if engine.tp % (dp * engine.attention_cp) == 0:
        return None
    cp = f" · attention_cp {engine.attention_cp}" if engine.attention_cp > 1 else ""
    return f"engine tp {engine.tp} does not divide by dp {dp}{cp} under DP attention"


@rule(
    "sglang-dp-attention-alone",
    severity="warning",
    source=f"{SGLANG} (enable_dp_attention)",
    needs="sglang",
    knobs=("engine.dp_attention",),
)
def sglang_dp_attention_alone(job: Job) -> str | None:
    """DP attention does nothing with dp 1."""
    engine = engine_of(job)
    return "dp_attention with dp 1 has no effect" if engine.dp_attention and engine.dp == 1 else None


def engine_nodes(job: Job) -> int:
    """Nodes over which one engine lies."""
    return -(-engine_of(job).gpus_per_engine // job.gpus_per_node)


@rule("sglang-nodes", source=SGLANG, needs="sglang", knobs=(engine_scale, "engine.pp"))
def sglang_nodes(job: Job) -> str | None:
    """An engine over several nodes has tp · pp divisible by their number."""
    engine, nodes = engine_of(job), engine_nodes(job)
    ranks = engine.tp * engine.pp
    return (
        f"engine tp {engine.tp} · pp {engine.pp} = {ranks} does not divide over {nodes} nodes"
        if ranks % nodes
        else None
    )


def attention_over_ranks(job: Job) -> list[Changes]:
    """The same devices under DP attention, where tp includes dp."""
    engine = engine_of(job)
    return [(("engine.dp_attention", True), ("engine.tp", engine.tp * engine.dp))]


@rule("sglang-nodes-dp", source=SGLANG, needs="sglang", knobs=(attention_over_ranks, "engine.dp"))
def sglang_nodes_dp(job: Job) -> str | None:
    """An engine over several nodes has dp above 1 only under DP attention."""
    engine, nodes = engine_of(job), engine_nodes(job)
    return (
        f"dp {engine.dp} over {nodes} nodes without dp_attention"
        if nodes > 1 and engine.dp > 1 and not engine.dp_attention
        else None
    )


@rule("sglang-dense-tp", source=f"{SGLANG} (moe_dense_tp_size)", needs="sglang", knobs=("engine.moe_dense_tp",))
def sglang_dense_tp(job: Job) -> str | None:
    """SGLang's moe_dense_tp is 1, tp, or not given."""
    engine = engine_of(job)
    return (
        f"moe_dense_tp {engine.moe_dense_tp} with tp {engine.tp}: it is 1 or tp"
        if engine.moe_dense_tp not in (None, 1, engine.tp)
        else None
    )


@rule(
    "sglang-pipeline-speculation",
    severity="warning",
    source=f"{SGLANG} (pp_size)",
    needs="sglang",
    knobs=("engine.speculative",),
)
def sglang_pipeline_speculation(job: Job) -> str | None:
    """SGLang turns speculation off in a pipeline."""
    engine = engine_of(job)
    return f"speculative with engine pp {engine.pp} is turned off" if engine.speculative and engine.pp > 1 else None


@rule("sglang-runner", source=f"{SGLANG} (moe_runner_backend)", needs="sglang moe", knobs=(expert_sizes,))
def sglang_runner(job: Job) -> str | None:
    """The runner flashinfer_cutlass needs ep 1 or tp; cutlass in fp8 needs ep 1."""
    engine, ep = engine_of(job), expert_size(engine_of(job))
    if engine.moe_runner == "flashinfer_cutlass" and ep not in (1, engine.tp):
        return f"moe_runner flashinfer_cutlass with engine ep {ep}: it needs 1 or tp {engine.tp}"
    if engine.moe_runner == "cutlass" and engine.quantisation.startswith("fp8") and ep > 1:
        return f"moe_runner cutlass in {engine.quantisation} with engine ep {ep}: it needs 1"
    return None


def deep_gemm(job: Job) -> list[Changes]:
    """The runner that the back end needs."""
    return [(("engine.moe_runner", "deep_gemm"),)]


@rule("sglang-deepep-v2", source=f"{SGLANG} (moe_a2a_backend)", needs="sglang moe", knobs=(deep_gemm, no_back_end))
def sglang_deepep_v2(job: Job) -> str | None:
    """SGLang's back end deepep_v2 needs the runner deep_gemm."""
    engine = engine_of(job)
    if engine.moe_a2a != "deepep_v2" or engine.moe_runner in (None, "auto", "deep_gemm"):
        return None
    return f"all-to-all back end deepep_v2 with moe_runner {engine.moe_runner}: it needs deep_gemm"


def own_attention(job: Job) -> list[Changes]:
    """The attention back ends that SGLang chooses by itself, in place of those that it can't start."""
    return [tuple((f"engine.{name}", None) for name in _unfit_attention(job))]


@rule(
    "sglang-attention-backend",
    source="SGLang layers/attention/attention_registry.py: create_flashattention_v3_backend; "
    "arg_groups/overrides.py: _mla_kv_cache_dtype_checks, _cutedsl_prefill_backend_fill, attention_backends_of; "
    "arg_groups/attention_hook.py: handle_attention_backend_compatibility",
    needs="sglang",
    knobs=(own_attention,),
)
def sglang_attention_backend(job: Job) -> str | None:
    """FlashAttention 3 is for Ampere and Hopper, TensorRT-LLM's attention for Hopper or Blackwell, its MLA for
    Blackwell, none is for AMD's devices: SGLang stops at its start. Prefill and decode may have their own."""
    engine, hardware = engine_of(job), job.hardware
    wrong = [
        f"{name} {getattr(engine, name)} on {hardware.name} ({hardware.arch}): {_ATTENTION[getattr(engine, name)][2]}"
        for name in _unfit_attention(job)
    ]
    return "; ".join(wrong) or None


def _unfit_attention(job: Job) -> list[str]:
    """The engine's fields whose attention back end is used and can't start on its devices."""
    engine, hardware = engine_of(job), job.hardware
    capability = int(hardware.arch[2:]) if hardware.arch.startswith("sm") else 0
    phases = ("prefill_attention_backend", "decode_attention_backend")
    used = dict.fromkeys(name if getattr(engine, name) else "attention_backend" for name in phases)
    found: list[str] = []
    for name in used if hardware.arch else ():
        least, largest, _ = _ATTENTION.get(getattr(engine, name) or "", (0, 999, ""))
        if not least <= capability <= largest:
            found.append(name)
    return found
