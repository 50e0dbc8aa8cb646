"""What an engine caches for the tokens it has seen, per device: bytes that grow with the tokens, and bytes per request.

    GQA            keys and values of every layer                                      grows
    MLA            one latent row a layer, the same on every tensor-parallel rank      grows
    + indexer      a row of keys (fp8 with a scale, or the model's dtype) a layer      grows
    DeepSeek-V4    one row per ``ratio`` tokens in compressed layers                   grows
                   a window of rows in every layer, states of compressors in float32   per request
    Inkling        keys and values of its global layers                                grows
                   a window in the other layers, states of convolutions in float32     per request

Sources: vLLM ``v1/kv_cache_interface.py`` (MLA rows of 656 bytes in fp8_ds_mla; DeepSeek-V4 rows of 584), transformers
``cache_utils.py`` and the models' own cache classes for the embedded engine. What SGLang sums up for a token is its own
(``sglang_pool.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.topology.records import EngineLayout, ModelShape

BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}
"""Bytes of one number."""

_FP8_MLA_SCALES = 4 * 4  # four float32 scales over a latent of 512
_V4_ROW = 448 + 64 * 2 + 7 + 1  # fp8 latent, bf16 rope, scales, one byte of padding
_FP8_INDEX_SCALE = 4
_V4_PAGE = 256
"""Tokens of a page of vLLM's with DeepSeek-V4."""


@dataclass(frozen=True, slots=True)
class CacheCost:
    """``per_token`` bytes (a fraction where rows cover several tokens) and ``per_request`` bytes, on one device."""

    per_token: float
    per_request: int = 0

    def bytes_of(self, num_requests: int, tokens_each: int) -> int:
        """Bytes of ``num_requests`` sequences of ``tokens_each`` tokens."""
        return round(num_requests * (self.per_token * tokens_each + self.per_request))

    def tokens_in(self, pool_bytes: int, num_requests: int) -> int | None:
        """Tokens that fit a pool beside what ``num_requests`` requests need whatever their length, 0 if not even that
        fits; None: any number, because nothing grows with the tokens."""
        left = pool_bytes - num_requests * self.per_request
        if left < 0:
            return 0
        return int(left / self.per_token) if self.per_token else None


def cache_cost(shape: ModelShape, engine: EngineLayout) -> CacheCost:
    """Cost on one device of ``engine``, of the layers that its pipeline stage holds (a share of 1/pp)."""
    whole = _COSTS[shape.attention](shape, engine, attention_tp(engine))
    # Decode context parallelism lays a sequence's tokens over its ranks (vLLM).
    return CacheCost(whole.per_token / engine.pp / engine.decode_cp, -(-whole.per_request // engine.pp))


def attention_tp(engine: EngineLayout) -> int:
    """Ranks among which heads are divided. SGLang's tensor-parallel size includes data-parallel attention, vLLM's does
    not (SGLang ``server_args.py``; vLLM ``config/parallel.py``)."""
    if engine.engine == "sglang" and engine.dp_attention:
        return max(1, engine.tp // max(1, engine.dp * engine.attention_cp))
    return engine.tp


def _row(engine: EngineLayout) -> int:
    return BYTES[engine.kv_cache_dtype]


def _heads(kv_heads: int, tp: int) -> int:
    return max(1, -(-kv_heads // tp))


def _gqa(shape: ModelShape, engine: EngineLayout, tp: int) -> CacheCost:
    return CacheCost(2 * shape.num_layers * _heads(shape.num_kv_heads, tp) * shape.head_dim * _row(engine))


def _mla(shape: ModelShape, engine: EngineLayout, tp: int) -> CacheCost:
    if engine.kv_cache_dtype == "fp8":
        latent = shape.kv_lora_rank + _FP8_MLA_SCALES + 2 * shape.rope_head_dim
    else:
        latent = _row(engine) * (shape.kv_lora_rank + shape.rope_head_dim)
    return CacheCost(shape.num_layers * latent + len(shape.index_layers) * _index_row(shape, engine))


def _index_row(shape: ModelShape, engine: EngineLayout) -> int:
    """One key of the indexer: fp8 with a scale in vLLM and SGLang, whatever the main cache; plain in transformers."""
    if engine.engine == "torch":
        return shape.indexer_head_dim * _row(engine)
    return shape.indexer_head_dim + _FP8_INDEX_SCALE


def _deepseek_v4(shape: ModelShape, engine: EngineLayout, tp: int) -> CacheCost:
    embedded = engine.engine == "torch"
    # Key and value are one row. The engines' rows are fp8 with a bf16 part; transformers' are in the model's dtype.
    plain = _row(engine) * shape.head_dim
    row = plain if embedded or engine.kv_cache_dtype != "fp8" else _V4_ROW
    indexed = [ratio for ratio in shape.compress_ratios if ratio == 4]
    compressed = sum(_paged(row, ratio, engine) for ratio in shape.compress_ratios if ratio)
    per_token = compressed + len(indexed) * _paged(_index_row(shape, engine), 4, engine)
    # A compressor collects keys and gates in float32 until a window is whole; ratio-4 windows overlap, and so does the
    # indexer's own compressor.
    heavy = sum(ratio * 2 * shape.head_dim for ratio in shape.compress_ratios if ratio > 4)
    sparse = len(indexed) * 2 * 4 * 2 * 2 * (shape.head_dim + shape.indexer_head_dim)
    window = shape.sliding_window * row * shape.num_layers
    return CacheCost(per_token, window + BYTES["fp32"] * (heavy + sparse))


def _paged(row: int, ratio: int, engine: EngineLayout) -> float:
    """Bytes a token of rows that cover ``ratio`` tokens. vLLM's pages are of 256 tokens, and filled up to whole 576
    bytes (512 of plain rows): vllm/models/deepseek_v4/attention.py: get_kv_cache_spec."""
    if engine.engine != "vllm":
        return row / ratio
    tokens = max(engine.page_tokens or _V4_PAGE, ratio)
    whole = 576 if engine.kv_cache_dtype == "fp8" else 512
    return -(-tokens // ratio * row // whole) * whole / tokens


def _inkling(shape: ModelShape, engine: EngineLayout, tp: int) -> CacheCost:
    num_local = len(shape.window_layers)
    num_global = shape.num_layers - num_local
    kv, local_kv = (_heads(heads, tp) * shape.head_dim for heads in (shape.num_kv_heads, shape.window_kv_heads))
    window = num_local * 2 * local_kv * _row(engine) * shape.sliding_window
    # Four convolutions a layer: over keys, over values, and over the two residual streams.
    features = num_global * 2 * kv + num_local * 2 * local_kv + shape.num_layers * 2 * shape.hidden
    states = (shape.conv_kernel - 1) * features * BYTES["fp32"]
    return CacheCost(num_global * 2 * kv * _row(engine), window + states)


_COSTS: dict[str, Callable[[ModelShape, EngineLayout, int], CacheCost]] = {
    "gqa": _gqa,
    "mla": _mla,
    "mla_dsa": _mla,
    "deepseek_v4": _deepseek_v4,
    "inkling": _inkling,
}
