"""How SGLang divides what it calls static memory: which bytes one more token takes, and which a request's slot takes.

    GQA           keys and values of every layer
    MLA           latent and rope, one number each; with an indexer a row of fp8 keys in every layer, shared ones too
    DeepSeek-V4   584 bytes a row: a tenth of the tokens in every layer's window, a quarter or a 128th compressed; the
                  indexer's rows; float32 states of ratio-4 compressors, 8 for 128 tokens of a window
                  a slot: 128 float32 states in each ratio-128 layer
    Inkling       global layers, and a tenth of the tokens in the windowed ones; an eleventh of the pool for states of
                  convolutions
    drafts        one more layer's share

These are SGLang's own sums, which decide how many tokens it admits. Its pools may take more than they say: ``beyond``.

Source: SGLang 0.5.16 srt/model_executor/pool_configurator.py (DefaultPoolConfigurator, HybridSWAPoolConfigurator,
DSV4PoolConfigurator), srt/mem_cache/deepseek_v4_memory_pool.py, memory_pool.py: DSATokenToKVPool,
kv_cache_configurator.py: _handle_max_mamba_cache; srt/arg_groups/deepseek_v4_hook.py and overrides.py for defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lockstep.topology.cache import BYTES, attention_tp, cache_cost
from lockstep.topology.memory_records import MemoryItem, gigabytes
from lockstep.topology.records import EngineLayout, Job, ModelShape

WINDOW_TOKENS = 0.1
"""Tokens of a windowed layer's pool for each of a full layer's: swa_full_tokens_ratio of both models with windows."""

CONVOLUTION_SHARE = 0.1 / 1.1
"""Inkling's mamba_full_memory_ratio 0.1: what of the pool goes to states of convolutions."""

V4_REQUESTS = 256
"""max_running_requests that SGLang sets for DeepSeek-V4 where nothing is said."""

_V4_ROW_EXTRA = 8  # seven scales of a latent in fp8, and one byte of padding
_FP8_SCALE = 4
_FLOAT32 = 4
_UNIFIED = ("SGLANG_HACK_FLASHMLA_BACKEND", "unified_kv_triton")


@dataclass(frozen=True, slots=True)
class SglangPool:
    """``per_token`` bytes of one more token and ``fixed`` bytes of all slots, of the ``share`` of the pool that holds
    tokens. ``beyond_token`` and ``beyond_fixed``: what is allocated without being in these sums. ``states_token``: the
    compressors' states in ``per_token`` (those in ``fixed`` are nothing else)."""

    per_token: float
    fixed: int = 0
    share: float = 1.0
    beyond_token: float = 0.0
    beyond_fixed: int = 0
    states_token: float = 0.0

    def tokens_in(self, pool_bytes: int) -> int:
        """Tokens that SGLang admits to a pool: 0 where the slots alone do not fit, and it refuses to start."""
        return max(0, int((pool_bytes * self.share - self.fixed) / self.per_token))

    def limited(self, tokens: int, pool_bytes: int) -> int:
        """What is taken of a pool if ``max_total_tokens`` bounds its tokens: states of convolutions take their share of
        the whole all the same."""
        return min(pool_bytes, round(pool_bytes * (1 - self.share) + self.fixed + self.per_token * tokens))

    def beyond(self, tokens: int) -> int:
        """Bytes of a pool of ``tokens`` that no sum has; never less than none, because less use is not given back."""
        return max(0, round(self.beyond_fixed + self.beyond_token * tokens))


def sglang_pool(job: Job) -> SglangPool:
    """The pool of one rank of ``job.engine``. Raises ValueError if that is no SGLang."""
    engine = job.engine
    if engine is None or engine.engine != "sglang":
        raise ValueError(f"{job.name} has no SGLang engine")
    pool = _POOLS[job.model.attention](job, engine)
    draft = 1 + (1 / job.model.num_layers if engine.speculative else 0)
    return replace(
        pool,
        per_token=pool.per_token * draft / engine.pp,
        fixed=-(-pool.fixed // engine.pp),
        beyond_token=pool.beyond_token * draft / engine.pp,
        beyond_fixed=-(-pool.beyond_fixed // engine.pp),
        states_token=pool.states_token / engine.pp,
    )


def beyond_items(pool: SglangPool, tokens: int) -> tuple[MemoryItem, ...]:
    """What the pools take on top of SGLang's own sums, while it is awake."""
    size = pool.beyond(tokens)
    if not size:
        return ()
    note = f"rows of {tokens:,} tokens as they are allocated, less what SGLang counts for them"
    return (MemoryItem("cache beyond its sums", size, "counted", note, "SGLang memory_pool.py", "engine"),)


def states_outside(job: Job, pool: SglangPool, tokens: int) -> tuple[MemoryItem, ...]:
    """Compressors' states of DeepSeek-V4, which on ROCm are allocated outside the memory saver: sleep keeps them."""
    if job.model.attention != "deepseek_v4" or job.hardware.vendor != "amd":
        return ()
    size = pool.fixed + round(pool.states_token * tokens)
    engine = job.engine or EngineLayout()
    note = f"{gigabytes(pool.fixed)} of {_requests(engine) + 1} slots, the rest of {tokens:,} tokens; sleep keeps them"
    source = "SGLang deepseek_v4_compress_state.py: _alloc_kv_score_buffer"
    basis = "counted" if engine.max_running_requests else "assumed"
    return (MemoryItem("compressor states", size, basis, note, source, "engine"),)


def default_chunk(memory_bytes: int | None) -> int:
    """chunked_prefill_size where nothing is said, by the device's memory."""
    return _by_memory(memory_bytes, 1)[0]


def default_fraction(job: Job, memory_bytes: int) -> float:
    """mem_fraction_static where nothing is said: all but a reserve for activations, graphs and parallel ranks.

    Source: SGLang 0.5.16 server_args.py: _handle_gpu_memory_settings, reserve_for_graph_mb. Graphs of prefills, which
    most models don't have by default, are left out.
    """
    engine = job.engine or EngineLayout()
    chunk, graphs = _by_memory(memory_bytes, engine.tp)
    reserved = 512 + 1.5 * max(engine.chunked_prefill_tokens or chunk, 2048) + 128 * engine.tp * engine.pp
    reserved += 2 * graphs if engine.cuda_graphs is not False else 0
    reserved += (4.5 if graphs > 300 else 3) * graphs * engine.dp if engine.dp_attention else 0
    if memory_bytes > 60 << 30:
        reserved = max(reserved, 10 << 10)
    reserved += 2 << 10 if engine.moe_a2a == "deepep" and engine.cuda_graphs is not False else 0
    return round(1 - reserved * 2**20 / memory_bytes, 3)


def _by_memory(memory_bytes: int | None, tp: int) -> tuple[int, int]:
    """(tokens of a prefill, largest batch of a captured decode step) of a device."""
    if memory_bytes is None:
        return 4096, 160
    gib = memory_bytes / 2**30
    for below, chunk, narrow, wide in (
        (20, 2048, 8, 8),
        (35, 2048, 24, 80),
        (60, 4096, 32, 160),
        (160, 8192, 256, 512),
    ):
        if gib < below:
            return chunk, narrow if tp < 4 else wide
    return 16_384, 512


def _requests(engine: EngineLayout) -> int:
    """Requests at once on one rank of data-parallel attention."""
    asked = engine.max_running_requests or V4_REQUESTS
    return asked // engine.dp if engine.dp_attention else asked


def _plain(job: Job, engine: EngineLayout) -> SglangPool:
    return SglangPool(cache_cost(job.model, replace(engine, pp=1)).per_token)


def _latent(job: Job, engine: EngineLayout) -> SglangPool:
    shape, row = job.model, BYTES[engine.kv_cache_dtype]
    numbers = shape.kv_lora_rank + shape.rope_head_dim
    indexed = shape.attention == "mla_dsa"
    index = shape.indexer_head_dim + _FP8_SCALE if indexed else 0
    # In fp8 the rows of a sparse model keep their rope in bf16 and four scales, which the sum leaves out. On ROCm the
    # kernels read plain rows.
    scaled = indexed and engine.kv_cache_dtype == "fp8" and job.hardware.vendor != "amd"
    more = shape.rope_head_dim + _FP8_SCALE * 4 if scaled else 0
    return SglangPool(shape.num_layers * (numbers * row + index), beyond_token=shape.num_layers * more)


def _deepseek_v4(job: Job, engine: EngineLayout) -> SglangPool:
    shape = job.model
    indexed = sum(ratio == 4 for ratio in shape.compress_ratios)
    compressed = sum(1 / ratio for ratio in shape.compress_ratios if ratio)
    row = shape.head_dim + shape.rope_head_dim + _V4_ROW_EXTRA
    rows = row * (WINDOW_TOKENS * shape.num_layers + compressed)
    # Overlapping windows of ratio 4: key and gate, twice as wide, of attention and of its indexer.
    width = 2 * 2 * (shape.head_dim + shape.indexer_head_dim) * _FLOAT32
    states = WINDOW_TOKENS * (16 if engine.speculative else 8) / shape.sliding_window * width * indexed
    index = indexed * (shape.indexer_head_dim + _FP8_SCALE) / 4
    plain = SglangPool(rows + index + states, _v4_slots(shape, engine), states_token=states)
    if not _unified(job):
        return plain
    # One buffer of bf16 rows a layer: a ring of a window for every slot, and compressed rows.
    wide = 2 * shape.head_dim
    ring = (_requests(engine) + 1) * shape.sliding_window * wide * shape.num_layers
    return replace(plain, beyond_token=wide * compressed - rows, beyond_fixed=ring)


def _v4_slots(shape: ModelShape, engine: EngineLayout) -> int:
    """Float32 states of all slots in layers of a larger ratio: as many as the ratio, in whole blocks of it."""
    total = 0
    for ratio in shape.compress_ratios:
        if ratio > 4:
            ring = ratio * 2 if engine.speculative else ratio
            states = (_requests(engine) + 1) * ring + ring + 1
            total += -(-states // ratio) * ratio * 2 * shape.head_dim * _FLOAT32
    return total


def _unified(job: Job) -> bool:
    """Whether the engine's environment asks for the one-buffer cache, which only ROCm has."""
    name, value = _UNIFIED
    return job.hardware.vendor == "amd" and job.environment.get("engine", {}).get(name) == value


def _inkling(job: Job, engine: EngineLayout) -> SglangPool:
    shape, tp, row = job.model, attention_tp(engine), BYTES[engine.kv_cache_dtype]
    local = len(shape.window_layers)
    kv, local_kv = (
        2 * max(1, -(-heads // tp)) * shape.head_dim * row for heads in (shape.num_kv_heads, shape.window_kv_heads)
    )
    full = shape.num_layers - local
    # Without a global layer the windows' tokens are all there are.
    per_token = full * kv + (WINDOW_TOKENS if full else 1) * local * local_kv
    return SglangPool(per_token, share=1 - CONVOLUTION_SHARE)


_POOLS: dict[str, Callable[[Job, EngineLayout], SglangPool]] = {
    "gqa": _plain,
    "mla": _latent,
    "mla_dsa": _latent,
    "deepseek_v4": _deepseek_v4,
    "inkling": _inkling,
}
