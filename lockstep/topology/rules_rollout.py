"""Rules that both rollout engines share: their size, heads, experts and blocks against how they split the model."""

from __future__ import annotations

from lockstep.topology.records import EngineLayout, Job
from lockstep.topology.repairs import divisors
from lockstep.topology.rules import Changes, engine_of, rule
from lockstep.topology.rules_placement import engine_scale

VLLM_PARALLEL = "vLLM vllm/config/parallel.py: ParallelConfig"
VLLM_MODEL = "vLLM vllm/config/model.py: ModelConfig.verify_with_parallel_config"
SGLANG = "SGLang python/sglang/srt/server_args.py: ServerArgs.check_server_args"
FP8 = (
    "vLLM model_executor/layers/quantization/utils/fp8_utils.py: validate_fp8_block_shape; "
    "SGLang layers/quantization/fp8.py: Fp8MoEMethod.create_weights"
)

SGLANG_A2A_CUDA = ("deepep", "deepep_v2", "mooncake", "nixl", "flashinfer", "megamoe", "pplx")
SGLANG_A2A_OTHER = ("mori", "ascend_fuseep")


def expert_size(engine: EngineLayout) -> int:
    """Expert-parallel size that the engine really takes: SGLang's all-to-all back ends set it to tp."""
    if engine.engine == "sglang" and engine.moe_a2a in SGLANG_A2A_CUDA + SGLANG_A2A_OTHER:
        return engine.tp
    return engine.ep


def attention_tp(engine: EngineLayout) -> int:
    """Ranks that share the attention heads. SGLang's tp includes dp under DP attention."""
    if engine.engine != "sglang":
        return engine.tp
    parts = (engine.dp if engine.dp_attention else 1) * engine.attention_cp
    return max(1, engine.tp // parts)


def moe_tp(engine: EngineLayout) -> int:
    """Ranks that share one routed expert. vLLM without expert parallelism spreads an expert over all ranks."""
    if engine.engine == "sglang":
        return max(1, engine.tp // (expert_size(engine) * engine.moe_dp))
    return 1 if engine.ep > 1 else engine.tp * engine.dp * engine.prefill_cp


def dense_tp(engine: EngineLayout) -> int:
    """Ranks that share a dense or shared MLP."""
    return engine.moe_dense_tp or engine.tp


def ranks_of(engine: EngineLayout) -> tuple[int, str]:
    """Devices that the engine's axes make, and how."""
    if engine.engine == "vllm":
        product = engine.tp * engine.pp * engine.dp * engine.prefill_cp
        return product, f"tp {engine.tp} · pp {engine.pp} · dp {engine.dp} · prefill_cp {engine.prefill_cp}"
    if engine.engine == "sglang" and engine.dp_attention:
        return engine.tp * engine.pp, f"tp {engine.tp} · pp {engine.pp} (tp includes dp {engine.dp})"
    return engine.tp * engine.pp * engine.dp, f"tp {engine.tp} · pp {engine.pp} · dp {engine.dp}"


def engine_devices(job: Job) -> list[Changes]:
    """The number of devices that the axes make."""
    return [(("engine.gpus_per_engine", ranks_of(engine_of(job))[0]),)]


@rule(
    "engine-size",
    source=f"{VLLM_PARALLEL}; {SGLANG}",
    needs="engine",
    knobs=(engine_devices, "engine.tp", "engine.dp", "engine.pp"),
)
def engine_size(job: Job) -> str | None:
    """An engine has as many devices as its axes make."""
    engine = engine_of(job)
    product, how = ranks_of(engine)
    return (
        f"{how} = {product} for an engine of {engine.gpus_per_engine} devices"
        if product != engine.gpus_per_engine
        else None
    )


def one_device(job: Job) -> list[Changes]:
    """One process."""
    engine, names = engine_of(job), ("gpus_per_engine", "tp", "pp", "dp", "ep")
    return [tuple((f"engine.{name}", 1) for name in names if getattr(engine, name) != 1)]


@rule(
    "embedded-engine",
    source="Lockstep's own engine runs in the trainer's process",
    needs="torch",
    knobs=(one_device,),
)
def embedded_engine(job: Job) -> str | None:
    """The embedded engine is one process on one device."""
    engine = engine_of(job)
    axes = {name: getattr(engine, name) for name in ("tp", "pp", "dp", "ep")}
    wrong = [f"{name} {size}" for name, size in axes.items() if size != 1]
    return f"{', '.join(wrong)} with the torch engine, which has one device" if wrong else None


# --- heads ------------------------------------------------------------------------------------------------------------


def attention_splits(job: Job) -> list[Changes]:
    """Other ways to split the same devices, or other engines: tp smaller or larger, DP attention included."""
    engine = engine_of(job)
    whole = engine.gpus_per_engine
    changes: list[Changes] = []
    for tp in divisors(max(1, whole)):
        same: list[tuple[str, object]] = [("engine.tp", tp)]
        if engine.engine == "vllm" and whole % (tp * engine.pp * engine.prefill_cp) == 0:
            changes.append((*same, ("engine.dp", whole // (tp * engine.pp * engine.prefill_cp))))
    if engine.engine == "sglang" and engine.dp_attention:
        changes += [(("engine.dp", dp),) for dp in divisors(engine.tp)]
    changes += engine_scale(job)
    return [entry for entry in changes if any(path != "engine.ep" for path, _ in entry)]


@rule("engine-heads", source=f"{VLLM_MODEL}; {SGLANG}", needs="engine", knobs=(engine_scale, attention_splits))
def engine_heads(job: Job) -> str | None:
    """The engine's attention heads divide by the ranks that share attention."""
    heads, ranks = job.model.num_heads, attention_tp(engine_of(job))
    return f"{heads} attention heads do not divide by the engine's tp {_attention_text(job)}" if heads % ranks else None


def _attention_text(job: Job) -> str:
    engine, ranks = engine_of(job), attention_tp(engine_of(job))
    return (
        f"{ranks}"
        if ranks == engine.tp
        else f"{ranks} (tp {engine.tp} / dp {engine.dp} / attention_cp {engine.attention_cp})"
    )


@rule("engine-kv-heads", source=f"{VLLM_MODEL}; {SGLANG}", needs="engine", knobs=(engine_scale, attention_splits))
def engine_kv_heads(job: Job) -> str | None:
    """The engine's key/value heads divide by those ranks, or the ranks by them. MLA's latent is whole on every rank."""
    model, ranks = job.model, attention_tp(engine_of(job))
    if model.attention not in ("gqa", "inkling"):
        return None
    wrong = sorted(
        {heads for heads in (model.num_kv_heads, model.window_kv_heads) if heads and heads % ranks and ranks % heads}
    )
    if not wrong:
        return None
    heads = " and ".join(map(str, wrong))
    return f"{heads} key/value heads and the engine's tp {_attention_text(job)}: neither divides the other"


@rule(
    "engine-output-groups",
    source="vLLM vllm/model_executor/models/deepseek_v4.py; SGLang python/sglang/srt/models/deepseek_v4.py",
    needs="engine",
    knobs=(engine_scale, attention_splits),
)
def engine_output_groups(job: Job) -> str | None:
    """DeepSeek-V4's output groups divide by the ranks that share attention."""
    groups, ranks = job.model.o_groups, attention_tp(engine_of(job))
    return (
        f"{groups} output groups (o_groups) do not divide by the engine's tp {ranks}"
        if groups and groups % ranks
        else None
    )


# --- experts and widths -----------------------------------------------------------------------------------------------


@rule("engine-no-experts", source=f"{VLLM_MODEL}", needs="engine", knobs=("engine.ep",))
def engine_no_experts(job: Job) -> str | None:
    """A model without experts has no expert parallelism in the engine."""
    ep = engine_of(job).ep
    return f"engine ep {ep} for {job.model.name}, which has no experts" if ep > 1 and not job.model.is_moe else None


def expert_sizes(job: Job) -> list[Changes]:
    """The engine's expert-parallel sizes."""
    engine = engine_of(job)
    whole = engine.tp * engine.prefill_cp * engine.dp if engine.engine == "vllm" else engine.tp
    sizes = (whole, 1) if engine.engine == "vllm" else divisors(max(1, whole))
    return [
        (("engine.ep", size),)
        for size in sorted(sizes, key=lambda size: (abs(size - engine.ep), size))
        if size != engine.ep
    ]


@rule(
    "engine-ffn",
    source=f"{VLLM_PARALLEL}; SGLang layers/moe/fused_moe_triton/layer.py",
    needs="engine",
    knobs=(expert_sizes, engine_scale, attention_splits),
)
def engine_ffn(job: Job) -> str | None:
    """Widths of experts, shared experts and dense MLPs divide by the ranks that share them."""
    wrong = [f"{what} = {width} / {ranks}" for what, width, ranks in engine_widths(job) if width % ranks]
    return f"the engine can't divide {', '.join(wrong)}" if wrong else None


def engine_widths(job: Job) -> list[tuple[str, int, int]]:
    """What the engine divides: name, width, ranks."""
    model, engine = job.model, engine_of(job)
    widths: list[tuple[str, int, int]] = []
    if model.is_moe:
        widths.append(("routed experts' ffn", model.moe_ffn, moe_tp(engine)))
        if model.num_shared_experts:
            widths.append(("shared experts' ffn", model.num_shared_experts * model.moe_ffn, dense_tp(engine)))
    if model.ffn and (not model.is_moe or model.dense_layers):
        widths.append(("dense ffn", model.ffn, dense_tp(engine)))
    return widths


def _attention_widths(job: Job) -> list[tuple[str, int, int]]:
    """Query and key/value heads of the fused projection, each of which is made of blocks; a key/value head that is
    replicated is whole on its rank."""
    model, ranks = job.model, attention_tp(engine_of(job))
    if model.attention not in ("gqa", "inkling"):
        return []
    shared = min(ranks, model.num_kv_heads)
    return [
        ("query heads", model.num_heads * model.head_dim, ranks),
        ("key/value heads", model.num_kv_heads * model.head_dim, shared),
    ]


@rule("engine-fp8-blocks", source=FP8, needs="engine", knobs=(expert_sizes, engine_scale, attention_splits))
def engine_fp8_blocks(job: Job) -> str | None:
    """In block fp8 each shard of a weight is made of whole blocks of 128; mxfp4 experts have blocks of 32."""
    quantisation = engine_of(job).quantisation
    if quantisation in ("none", "int4"):
        return None
    wrong: list[str] = []
    for what, width, ranks in (*_attention_widths(job), *engine_widths(job)):
        block = 32 if quantisation == "mxfp4_experts" and what.startswith("routed") else 128
        if width % ranks == 0 and width // ranks % block:
            wrong.append(f"{what} {width} / {ranks} = {width // ranks} is no multiple of {block}")
    return f"engine quantisation {quantisation}: {', '.join(wrong)}" if wrong else None


def no_back_end(job: Job) -> list[Changes]:
    """No all-to-all back end."""
    return [(("engine.moe_a2a", None),)]


@rule(
    "engine-a2a-dense",
    severity="warning",
    source="only MoE layers dispatch tokens",
    needs="engine",
    knobs=(no_back_end,),
)
def a2a_dense(job: Job) -> str | None:
    """An all-to-all back end does nothing for a model without experts."""
    name = engine_of(job).moe_a2a
    return (
        f"all-to-all back end {name} for {job.model.name}, which has no experts"
        if name not in (None, "none") and not job.model.is_moe
        else None
    )


def vendor_problem(engine: str, name: str, vendor: str, cuda: tuple[str, ...], rocm: tuple[str, ...]) -> str | None:
    """What is wrong with an all-to-all back end's name on a vendor's devices, None where nothing is."""
    right = {"nvidia": cuda, "amd": rocm}.get(vendor, cuda + rocm)
    if name in right:
        return None
    if name in cuda + rocm:
        return f"all-to-all back end {name} on {vendor} devices: there {engine} has {', '.join(right)}"
    return f"{engine} has no all-to-all back end {name}: it is {', '.join(right)}"


# --- memory -----------------------------------------------------------------------------------------------------------


@rule(
    "engine-memory-fraction",
    source="vLLM vllm/config/cache.py: gpu_memory_utilization; SGLang server_args.py: mem_fraction_static",
    needs="engine",
    knobs=("engine.memory_fraction",),
)
def engine_memory_fraction(job: Job) -> str | None:
    """The share of memory that an engine takes is above 0 and below 1 (vLLM: at most 1)."""
    engine = engine_of(job)
    fraction = engine.memory_fraction
    if fraction is None or 0 < fraction < 1 or (fraction == 1 and engine.engine == "vllm"):
        return None
    return f"engine memory_fraction {fraction} is not between 0 and 1"


# --- ROCm -------------------------------------------------------------------------------------------------------------


@rule(
    "paused-all-reduce",
    source="ROCm/aiter#2061: custom all-reduce buffers at fixed addresses are stale after a pause",
    needs="engine",
    knobs=("engine.custom_all_reduce", "engine.cuda_graphs"),
)
def paused_all_reduce(job: Job) -> str | None:
    """On ROCm a colocated engine, which pauses its memory, has no custom all-reduce in captured graphs."""
    engine = engine_of(job)
    paused = job.colocated and job.train is not None and job.hardware.vendor == "amd"
    if not (paused and engine.custom_all_reduce and engine.cuda_graphs is not False and engine.tp > 1):
        return None
    where = f"tp {engine.tp} and a colocated trainer on {job.hardware.name}"
    return f"custom_all_reduce with captured graphs, {where}: it deadlocks"


def plain_segments(job: Job) -> list[Changes]:
    """The engine's environment without expandable segments."""
    engine = {
        name: value for name, value in job.environment.get("engine", {}).items() if "expandable_segments" not in value
    }
    return [(("environment", {**job.environment, "engine": engine}),)]


@rule(
    "expandable-segments",
    source="ROCm/aiter#4174: memory of expandable segments can't be shared between processes",
    needs="engine",
    knobs=(plain_segments,),
)
def expandable_segments(job: Job) -> str | None:
    """On ROCm an engine with tp above 1 shares buffers between processes, which expandable segments rule out."""
    engine = engine_of(job)
    values = job.environment.get("engine", {})
    named = [f"{name}={value}" for name, value in values.items() if "expandable_segments:true" in value.lower()]
    if job.hardware.vendor != "amd" or engine.tp == 1 or not named:
        return None
    return f"{', '.join(named)} with engine tp {engine.tp} on {job.hardware.name}: all-reduce can't be set up"


@rule(
    "rocm-fp8-cache",
    severity="warning",
    source="vllm-project/vllm#45562, mended for one model by #45720",
    needs="vllm",
    knobs=("engine.kv_cache_dtype",),
)
def rocm_fp8_cache(job: Job) -> str | None:
    """A cache in fp8 under sparse attention, where the device's fp8 is e4m3fnuz: vLLM read its bytes as e4m3fn, and
    answers were noise with status 200 (GSM8K 0.967 → 0.010). Nobody has published an accuracy since for other models.
    No error: vLLM 0.32.0 views the cache of sparse MLA in the device's own dialect (v1/attention/backends/mla/
    rocm_aiter_mla_sparse.py). DeepSeek-V4 has no other cache."""
    sparse = job.model.attention == "mla_dsa"
    if not sparse or job.hardware.fp8 != "e4m3fnuz" or engine_of(job).kv_cache_dtype != "fp8":
        return None
    return (
        f"kv_cache_dtype fp8 with sparse attention on {job.hardware.name}, whose fp8 is e4m3fnuz: vLLM has read such a "
        "cache as e4m3fn, which halves or doubles every key and value; compare its log-probs before you train"
    )
