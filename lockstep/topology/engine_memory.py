"""What a rollout engine holds on one device: weights as it quantises them, its cache by its own definition, overhead.

    vLLM     budget = ⌈total · gpu_memory_utilization⌉ for the whole process, and a start is refused if less is free;
             cache = budget − weights − peak activation − what is not torch's − graphs; a size in bytes overrides it
    SGLang   weights + cache = mem_fraction_static · (free before loading); activations and graphs have the rest;
             tokens by its own sums of the cache (sglang_pool.py)
    torch    (embedded) the caches of the sequences that run, and copies of them when one leaves its batch

Source: vLLM v1/worker/utils.py: request_memory; SGLang model_executor/model_runner.py and server_args.py; Lockstep
rollout/module_decoder.py, cache_rows.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.topology.cache import BYTES, CacheCost, attention_tp, cache_cost
from lockstep.topology.memory_records import MARGIN, MemoryItem, gigabytes
from lockstep.topology.module_activations import module_working_set
from lockstep.topology.parameters import LayerParameters, Split, has_counted_mtp, layer_parameters
from lockstep.topology.records import EngineLayout, Finding, Job, ModelShape
from lockstep.topology.sglang_pool import (
    SglangPool,
    beyond_items,
    default_chunk,
    default_fraction,
    sglang_pool,
    states_outside,
)
from lockstep.topology.trainer_memory import CONTEXT_BYTES, context_item, sequence_tokens

VLLM_UTILISATION = 0.92
PREFILL_TOKENS = 8192
"""Tokens of one prefill where the job does not say: vLLM's default on a large card."""
EMBEDDED_PREFILL_TOKENS = 4096
"""rollout.prefill_tokens."""
GRAPH_BYTES = 1_000_000_000
COMMUNICATOR_BYTES = 1 << 30
"""vLLM at tp 4: about 1 GiB (vllm issue 51485); RCCL: 1 GiB for the first communicator (LUMI guide issue 111)."""
DEFAULT_SLOTS = 64
_FP8 = 1 + 4 / (128 * 128)  # a float32 scale a block
_MXFP4 = 0.5 + 1 / 32


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One engine rank: ``awake`` while it generates, ``loaded`` with weights and no cache, ``asleep``.
    ``kv_tokens`` fit its cache, None: any number; ``kv_tokens_least`` if a cache by fraction gets less by the margin of
    all that the fraction covers."""

    awake: tuple[MemoryItem, ...]
    loaded: tuple[MemoryItem, ...]
    asleep: tuple[MemoryItem, ...]
    kv_tokens: int | None
    findings: tuple[Finding, ...]
    kv_tokens_least: int | None = None


def engine_memory(job: Job, held_bytes: int) -> EngineMemory:
    """Memory of one rank of ``job.engine`` on a device where the trainer keeps ``held_bytes`` while it generates."""
    engine = job.engine
    if engine is None:
        raise ValueError(f"{job.name} has no engine")
    weights = _item("weights", *engine_weights(job.model, engine))
    cost = cache_cost(job.model, engine)
    if engine.engine == "torch":
        moments = _embedded_moments(job, engine, cost)
        most = max(moments, key=lambda items: sum(item.num_bytes for item in items))
        return EngineMemory((weights, *most), (weights,), (weights,), None, ())
    findings: list[Finding] = []
    working, overhead = _working(job, engine), _overhead(job, engine)
    taken = working.num_bytes + sum(item.num_bytes for item in overhead)
    pool = _pool(job, engine, held_bytes, weights.num_bytes, taken, findings)
    sums = sglang_pool(job) if engine.engine == "sglang" else cost
    found = pool.num_bytes
    tokens = _tokens_in(sums, found)
    most = engine.max_total_tokens
    if most and (tokens is None or most < tokens):
        tokens, size = most, _limited(sums, most, found)
        pool = _item("key/value cache", size, f"max_total_tokens {most}; {pool.note} would hold more")
    length = sequence_tokens(job) or 1
    if tokens is not None and tokens < length and not findings:
        message = f"the cache of {gigabytes(pool.num_bytes)} holds {tokens} tokens, one sequence has {length}"
        findings.append(Finding("engine-cache", "error", message, _more_cache(engine), _source(engine)))
    unsure = 0 if engine.kv_cache_bytes is not None else round(MARGIN * (weights.num_bytes + found))
    least = _tokens_in(sums, max(0, found - unsure))
    least = tokens if least is None or tokens is None else min(least, tokens)
    beyond: tuple[MemoryItem, ...] = ()
    residue = overhead
    if isinstance(sums, SglangPool):
        beyond = beyond_items(sums, tokens or 0)
        residue = (*overhead, *states_outside(job, sums, tokens or 0))
    awake = (weights, pool, *beyond, working, *overhead)
    return EngineMemory(awake, (weights, *residue), residue, tokens, tuple(findings), least)


def _limited(sums: SglangPool | CacheCost, tokens: int, pool_bytes: int) -> int:
    return (
        sums.limited(tokens, pool_bytes) if isinstance(sums, SglangPool) else min(pool_bytes, sums.bytes_of(1, tokens))
    )


def _tokens_in(sums: SglangPool | CacheCost, pool_bytes: int) -> int | None:
    """A pool of vLLM holds at least one sequence; more is the engine's business."""
    return sums.tokens_in(pool_bytes) if isinstance(sums, SglangPool) else sums.tokens_in(pool_bytes, 1)


def engine_weights(shape: ModelShape, engine: EngineLayout) -> tuple[int, str]:
    """(bytes of weights on the largest rank, how they are counted)."""
    heads = Split(tp=attention_tp(engine))
    wide = _expert_split(engine)
    layers = range(-(-shape.num_layers // engine.pp)) if engine.pp > 1 else range(shape.num_layers)
    # The last stage of a pipeline has the most experts: dense layers come first.
    first = shape.num_layers - len(layers)
    total = 0.0
    drafts = engine.speculative and has_counted_mtp(shape)
    # A draft is one layer more, after the last, and a product that merges its inputs; embedding and head are shared.
    for layer in (*layers, *([len(layers)] if drafts else [])):
        attention = layer_parameters(shape, first + layer, heads)
        total += _layer_bytes(shape, engine, attention, layer_parameters(shape, first + layer, wide))
    merge = 2 * shape.hidden**2 if drafts else 0
    total += (len(layers) + drafts) * _latent_extras(shape, engine, heads.tp)
    rows = -(-shape.vocab // heads.tp)
    outer = rows * shape.hidden * (1 if shape.tied_embeddings else 2) + shape.hidden + merge
    dtype = BYTES[engine.weight_dtype]
    form = engine.quantisation if engine.engine != "torch" else "none (dequantised)"
    note = f"tp {heads.tp}, experts over ep {wide.ep} · tp {wide.etp}, pp {engine.pp}; quantisation {form}"
    note += "; with the draft's layer" if drafts else ""
    return round(total) + dtype * outer, note


def _latent_extras(shape: ModelShape, engine: EngineLayout, tp: int) -> int:
    """Bytes of one MLA layer that no checkpoint has: its up-projection once more, in bf16, for absorbed attention
    (vLLM mla_attention.py: W_UK_T, W_UV; SGLang deepseek_weight_loader.py: w_kc, w_vc), and SGLang's indexers in the
    layers that share another's, averaged over all (SGLang deepseek_v2.py: Indexer)."""
    if shape.attention not in ("mla", "mla_dsa") or engine.engine == "torch":
        return 0
    heads = -(-shape.num_heads // tp)
    absorbed = BYTES["bf16"] * heads * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
    if engine.engine == "vllm" or not shape.index_layers:
        return absorbed
    indexer = layer_parameters(shape, shape.index_layers[0]).indexer
    width = BYTES[engine.weight_dtype] if engine.quantisation == "none" else 1
    return absorbed + indexer * width * (shape.num_layers - len(shape.index_layers)) // shape.num_layers


def _layer_bytes(shape: ModelShape, engine: EngineLayout, attention: LayerParameters, wide: LayerParameters) -> float:
    """Bytes of one layer: attention as its own ranks divide it, MLP and experts as theirs do."""
    plain = BYTES[engine.weight_dtype]
    kept = attention.latent + attention.indexer + wide.router + attention.norms + attention.hyper_connections
    linear = attention.heads + wide.mlp
    down = min(attention.latent, shape.hidden * (shape.q_lora_rank + (shape.kv_lora_rank or shape.head_dim)))
    if shape.attention in ("gqa", "inkling"):
        down = 0
    index = shape.q_lora_rank * shape.indexer_heads * shape.indexer_head_dim if attention.indexer else 0
    if engine.engine == "torch" or engine.quantisation == "none":
        return plain * (kept + linear + wide.experts)
    if engine.quantisation == "int4":
        narrow = wide.experts if shape.is_moe else linear
        return plain * (kept + linear + wide.experts - narrow) + _MXFP4 * narrow
    if engine.quantisation == "mxfp4_experts":
        beside = _FP8 if shape.attention == "deepseek_v4" else plain
        return beside * (linear + down + index) + plain * (kept - down - index) + _MXFP4 * wide.experts
    return _FP8 * (linear + down + index + wide.experts) + plain * (kept - down - index)


def _expert_split(engine: EngineLayout) -> Split:
    """How MLPs (tp) and experts (ep, etp) are divided; see the table of each engine's rules in the rules' sources."""
    if engine.engine == "vllm":
        ranks = engine.tp * engine.prefill_cp * engine.dp
        return Split(tp=engine.tp, ep=ranks if engine.ep > 1 else 1, etp=1 if engine.ep > 1 else ranks)
    if engine.engine == "sglang":
        # Any all-to-all back end sets ep to tp.
        ep = engine.tp if engine.moe_a2a not in (None, "none") else engine.ep
        dense = engine.moe_dense_tp or engine.tp
        return Split(tp=dense, ep=ep, etp=max(1, engine.tp // (ep * engine.moe_dp)))
    return Split()


def _pool(
    job: Job, engine: EngineLayout, held: int, weights: int, overhead: int, findings: list[Finding]
) -> MemoryItem:
    """The cache pool of vLLM or SGLang."""
    total = job.hardware.memory_bytes
    if engine.kv_cache_bytes is not None:
        return _item("key/value cache", engine.kv_cache_bytes, "given in bytes")
    if total is None:
        message = f"{job.hardware.name} has no known memory: a cache by fraction can't be counted"
        findings.append(Finding("engine-memory", "warning", message, "give the cache in bytes", _source(engine)))
        return _item("key/value cache", 0, message)
    stated = engine.memory_fraction is not None
    default = default_fraction(job, total) if engine.engine == "sglang" else VLLM_UTILISATION
    share = engine.memory_fraction if engine.memory_fraction is not None else default
    whose = "" if stated else " (the engine's default)"
    if engine.engine == "vllm":
        budget = math.ceil(total * share)
        pool = budget - weights - overhead
        note = f"⌈{gigabytes(total)} · {share:g}⌉{whose} − weights − {gigabytes(overhead)} of activations and overhead"
        if total - held < budget:
            fitting = math.floor((1 - held / total) * 100) / 100
            message = f"vLLM asks for {gigabytes(budget)} of {gigabytes(total)}, of which {gigabytes(held)} are held"
            repair = f"memory_fraction {share:g} → {fitting:g}, or offload the trainer while it generates"
            findings.append(Finding("engine-start", "error", message, repair, _source(engine)))
    else:
        free = total - held - CONTEXT_BYTES
        pool = round(free * share) - weights
        note = f"{share:g}{whose} of the {gigabytes(free)} free before loading, − weights"
        rest = overhead - CONTEXT_BYTES
        if 0 < round(free * (1 - share)) < rest < free - weights:
            message = f"{1 - share:.2f} of {gigabytes(free)} is left for {gigabytes(rest)} of activations and graphs"
            repair = f"memory_fraction {share:g} → {math.floor((1 - rest / free) * 100) / 100:g}"
            findings.append(Finding("engine-rest", "warning", message, repair, _source(engine)))
    if pool <= 0:
        message = f"nothing is left for the cache: {note}; weights have {gigabytes(weights)}"
        repair, changes = _room(job, engine)
        findings.append(Finding("engine-memory", "error", message, repair, _source(engine), changes))
    # What vLLM leaves is less sure than what it is given: the activations that it takes off are assumed.
    basis = "counted" if stated and engine.engine == "sglang" else "assumed"
    return MemoryItem("key/value cache", max(pool, 0), basis, note, owner="engine")


def _embedded_moments(job: Job, engine: EngineLayout, cost: CacheCost) -> list[list[MemoryItem]]:
    """The two moments at which the embedded engine may need most: prefill, and a sequence leaving a full batch."""
    length = sequence_tokens(job)
    if length is None:
        return [[MemoryItem("key/value cache", 0, "assumed", "lengths are not stated", owner="engine")]]
    slots, prompt = _running(job, engine), (job.batch.prompt_tokens if job.batch else None) or 0
    note = f"{slots} sequences of {length} tokens, and once more while the rest is copied as one leaves"
    full = _item("key/value cache", cost.bytes_of(1, length) * (2 * slots - 1), note)
    rows = slots * job.model.vocab * BYTES[engine.weight_dtype]
    prompts = min(slots, job.batch.num_prompts if job.batch else slots)
    filled = _item("key/value cache", 2 * cost.bytes_of(prompts, prompt), f"{prompts} prompts, in a batch and alone")
    tokens = min(engine.chunked_prefill_tokens or EMBEDDED_PREFILL_TOKENS, max(1, prompts * prompt))
    working = module_working_set(job.model, tokens, width=BYTES[engine.weight_dtype], gradient=False)
    return [
        [full, _item("logits", rows, f"{slots} sequences")],
        [filled, MemoryItem("prefill", working, "assumed", f"{tokens} tokens at once", owner="engine")],
    ]


def _working(job: Job, engine: EngineLayout) -> MemoryItem:
    """What a prefill of a full chunk or the sampling of every request takes for a moment."""
    usual = default_chunk(job.hardware.memory_bytes) if engine.engine == "sglang" else PREFILL_TOKENS
    prefill = (engine.chunked_prefill_tokens or usual) // (engine.dp if engine.dp_attention else 1)
    forward = module_working_set(job.model, prefill, gradient=False) // attention_tp(engine)
    logits = _running(job, engine) * job.model.vocab * (BYTES[engine.weight_dtype] + BYTES["fp32"])
    return MemoryItem(
        "prefill and logits", max(forward, logits), "assumed", f"{prefill} tokens at once", owner="engine"
    )


def _overhead(job: Job, engine: EngineLayout) -> tuple[MemoryItem, ...]:
    """Context, communicators and graphs."""
    if job.hardware.vendor == "cpu":
        return ()
    items = [context_item(job, "engine")]
    if engine.tp * engine.pp * engine.dp > 1:
        source = "vllm issue 51485; LUMI guide issue 111"
        items.append(MemoryItem("communicators", COMMUNICATOR_BYTES, "measured", "tp 4", source, owner="engine"))
    if engine.cuda_graphs is not False:
        items.append(MemoryItem("graphs", GRAPH_BYTES, "assumed", "captured decode steps", owner="engine"))
    return tuple(items)


def _running(job: Job, engine: EngineLayout) -> int:
    """Sequences that run at once on one engine."""
    if engine.max_running_requests:
        return engine.max_running_requests
    if job.batch is None:
        return DEFAULT_SLOTS
    engines = max(1, job.engine_pool // engine.gpus_per_engine)
    return max(1, min(DEFAULT_SLOTS, -(-job.batch.num_prompts * job.batch.group_size // engines)))


def _more_cache(engine: EngineLayout) -> str:
    return "raise memory_fraction" if engine.memory_fraction is not None else "give memory_fraction"


def _room(job: Job, engine: EngineLayout) -> tuple[str, tuple[tuple[str, object], ...]]:
    """Where room for the cache may come from; first of all from a trainer that stays."""
    if job.colocated and job.train is not None and job.train.backend == "megatron" and not job.memory.offload_weights:
        return "offload_weights off → on: the trainer must leave the device", (("memory.offload_weights", True),)
    return f"{_more_cache(engine)}; more ranks an engine; quantised weights", ()


def _source(engine: EngineLayout) -> str:
    return {
        "vllm": "vLLM v1/worker/utils.py: request_memory",
        "sglang": "SGLang model_executor/model_runner.py: profile_max_num_token",
        "torch": "lockstep/rollout/module_decoder.py",
    }[engine.engine]


def _item(name: str, num_bytes: int, note: str) -> MemoryItem:
    return MemoryItem(name, num_bytes, "counted", note, owner="engine")
