"""What autograd keeps of attention, routers and experts in transformers' modules: bytes a position, by architecture.

With b bytes a number and n columns (the row's length). The operations differ in how they attend:

    GQA           torch's fused attention; keys and values repeated where there is a mask
    MLA           fused attention over expanded heads, whose output is copied; latents with their norms
    Inkling       attention in parts, in float32, because a trained bias of positions needs its own gradient
    DeepSeek-V4   attention in parts over the window and the compressed rows; the indexer's scores are recorded although
                  no gradient comes back through its top-k; hyper-connections in float32 with their iterations

Those of GQA, MLA and Inkling are counted operation by operation, that of DeepSeek-V4 by its larger tensors.
"""

from __future__ import annotations

from lockstep.topology.records import ModelShape

_SINKHORN_STEPS = 20
"""hc_sinkhorn_iters."""


def attention_activations(shape: ModelShape, layer: int, row: int | None, width: int) -> float:
    """Bytes a position of one layer's attention. ``row``: columns of the mask, None where there is none."""
    if shape.attention == "gqa":
        return _gqa(shape, row, width)
    if shape.attention in ("mla", "mla_dsa"):
        return _mla(shape, row, width)
    if shape.attention == "inkling":
        return _inkling(shape, layer, row, width)
    return _deepseek_v4(shape, layer, row, width)


def router_activations(shape: ModelShape) -> int:
    """Bytes a position of one router: in float32 with GLM, the softmax alone with Qwen."""
    chosen = 8 * shape.experts_per_token
    if shape.attention in ("mla", "mla_dsa"):
        return 4 * shape.hidden + 5 * shape.num_experts + chosen + 4 * shape.experts_per_token + 28
    return 4 * shape.num_experts + chosen


def expert_activations(shape: ModelShape, width: int) -> tuple[int, int]:
    """Bytes of one routed row, and of one position in the shared experts."""
    inner = {"deepseek_v4": 6}.get(shape.attention, 4)  # DeepSeek-V4 clips gate and up: two tensors more
    weight = 4 if shape.attention in ("mla", "mla_dsa") else width
    routed = 2 * width * shape.hidden + inner * width * shape.moe_ffn + weight + 24
    shared = {"deepseek_v4": 6, "inkling": 5}.get(shape.attention, 4)  # Inkling scales each by its score
    return routed, shared * width * shape.num_shared_experts * shape.moe_ffn


def hyper_connection_activations(shape: ModelShape, width: int) -> int:
    """Bytes a position of both hyper-connections of a layer: streams in float32, normalised, in their own dtype, what
    is mixed out of them, and two tensors of each Sinkhorn step."""
    streams = shape.hyper_connections
    if not streams:
        return 0
    steps = _SINKHORN_STEPS * 2 * 4 * (streams * streams + streams)
    return 2 * ((8 + width) * streams * shape.hidden + width * shape.hidden + steps + 48 * streams)


def query_width(shape: ModelShape) -> int:
    """Features a position of all queries."""
    if shape.attention in ("mla", "mla_dsa"):
        return shape.num_heads * (shape.qk_nope_head_dim + shape.rope_head_dim)
    return shape.num_heads * shape.head_dim


def _gqa(shape: ModelShape, row: int | None, width: int) -> float:
    queries, keys = query_width(shape), shape.num_kv_heads * shape.head_dim
    normed = _head_norms(shape, keys, width) if shape.qk_norm else 0
    if row is None:
        return normed + 2 * width * (queries + keys) + 4 * shape.num_heads
    return normed + 4 * width * queries + 4 * shape.num_heads + width * row


def _mla(shape: ModelShape, row: int | None, width: int) -> float:
    latents = (4 + 2 * width) * (shape.q_lora_rank + shape.kv_lora_rank) + 8
    values = shape.num_heads * shape.v_head_dim
    # Values are a view of what keys and values were expanded to.
    expanded = shape.num_heads * shape.qk_nope_head_dim + values
    attended = width * (2 * query_width(shape) + expanded + 2 * values) + 4 * shape.num_heads
    return latents + attended + width * (row or 0)


def _inkling(shape: ModelShape, layer: int, row: int | None, width: int) -> float:
    kv_heads = shape.window_kv_heads if layer in shape.window_layers else shape.num_kv_heads
    queries, keys, columns = query_width(shape), kv_heads * shape.head_dim, row or 0
    convolutions = width * (2 * keys + 2 * shape.hidden)
    positions = width * shape.num_heads * (shape.relative_dim + columns)
    attended = 4 * 3 * queries + 4 * shape.num_heads * columns + width * queries
    return _head_norms(shape, keys, width) + convolutions + positions + attended + 5 * columns


def _deepseek_v4(shape: ModelShape, layer: int, row: int | None, width: int) -> float:
    ratio = shape.compress_ratios[layer] if layer < len(shape.compress_ratios) else 0
    queries, columns, norm = query_width(shape), row or 0, 4 + 2 * width
    latents = norm * (shape.q_lora_rank + shape.head_dim) + 12
    normed = (4 + width) * queries + (4 + width) * shape.num_heads
    seen = columns * (1 + (1 / ratio if ratio else 0)) + 1
    spread = seen / columns if columns else 1.0
    attended = width * (2 * queries * spread + 2 * queries + shape.num_heads * seen)
    output = width * shape.o_groups * shape.o_lora_rank
    overlap = 2 if ratio == 4 else 1
    compressed = overlap * (4 + 2 * width) * shape.head_dim if ratio else 0
    index = 0.0
    if ratio == 4:
        scores = 4 * (columns / 4) * shape.indexer_head_dim
        heads = shape.indexer_heads * shape.indexer_head_dim
        index = overlap * norm * shape.indexer_head_dim + scores + 12 * heads + 8 * shape.indexer_topk
    return latents + normed + attended + output + compressed + index


def _head_norms(shape: ModelShape, keys: int, width: int) -> int:
    """Queries and keys normed by head: float32 and normalised, and a reciprocal root for each head."""
    return (4 + width) * (query_width(shape) + keys) + 4 * (shape.num_heads + keys // shape.head_dim)
