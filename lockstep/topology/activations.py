"""What Megatron-Core keeps of a forward for its backward: bytes per layer and micro-batch, and of logits and loss.

bf16, flash attention, SwiGLU, no dropout, sequence parallel (T / tp positions outside the products). T are the tokens
of one micro-batch on one context-parallel rank. Per layer:

    attention   8·h + 2·(queries + keys and values) + 2·(output of the heads)         · T/tp
                and 2·(queries + keys) where heads are normalised: the norm's input
    MLP         6·T·f/tp
    experts     2·h + 6·f_e for each routed row, k·T/tp · imbalance rows; 8·T·E/tp of the router. The rows' output is
                not kept: their probability weighs the activation inside the expert (experts.py: bias_act_func)
    fp8         inputs of products in one byte for two, by columns only; the output of the heads a second time
    full recomputation   2·T·h/tp a layer (times the streams of hyper-connections), and one layer's working set

Selective recomputation drops what flash attention never kept: it counts as none. Source: Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models (2022), redone for flash attention and routed experts;
Megatron-LM transformer/moe/experts.py and fusions/fused_bias_swiglu.py; Transformer Engine module/layernorm_linear.py
(``update_usage(rowwise_usage=False)`` before saving). Held to a published peak: Megatron-Bridge
docs/training/moe-optimization.md, Qwen3-30B-A3B on 16 H100 with ep 16 and forced balance, 61.351 GB allocated.
"""

from __future__ import annotations

from lockstep.topology.records import ModelShape, TrainLayout

ROUTING_IMBALANCE = 1.2
"""Rows of the busiest expert-parallel rank over the mean, assumed."""


def layer_activations(
    shape: ModelShape,
    layer: int,
    tokens: int,
    layout: TrainLayout,
    *,
    fp8: bool = False,
    imbalance: float = ROUTING_IMBALANCE,
    working: bool = False,
) -> int:
    """Bytes that the backward of one decoder layer needs, nothing recomputed. ``fp8``: products keep their inputs in
    one byte. ``imbalance``: rows of the busiest expert-parallel rank over the mean. ``working``: while the layer runs,
    which is with the output of its experts' rows."""
    positions = tokens / layout.tp
    whole = positions if layout.sequence_parallel or layout.tp == 1 else tokens
    queries, keys_values, output, latent = _attention_widths(shape, layer)
    routed = shape.is_moe and layer >= shape.dense_layers
    # The router, which computes in bf16 at least, keeps its input beside the experts' rows.
    norms = 8 - (2 - routed if fp8 else 0)
    normalised = queries + keys_values // 2 if shape.qk_norm and shape.attention == "gqa" else 0
    heads = 2 * (queries + keys_values + output + normalised) + (output if fp8 else 0)
    attention = norms * shape.hidden * whole + heads * positions + 2 * latent * tokens
    streams = max(1, shape.hyper_connections)
    # Each of the two hyper-connections of a layer keeps its streams.
    residuals = (streams - 1) * 2 * 2 * shape.hidden * whole
    kept = attention + residuals + _feed_forward(shape, layer, tokens, layout, fp8, imbalance)
    return round(kept + (2 * shape.hidden * _rows(shape, tokens, layout, imbalance) if working and routed else 0))


def checkpoint_activations(shape: ModelShape, tokens: int, layout: TrainLayout) -> int:
    """Bytes of one layer's input, which full recomputation keeps."""
    return 2 * tokens * shape.hidden * max(1, shape.hyper_connections) // layout.tp


def logits_bytes(shape: ModelShape, tokens: int, layout: TrainLayout, *, chunk: int | None, gradient: bool) -> int:
    """Bytes of logits and of the loss on the last stage: 2 in bf16, 4 in float32 and, with a gradient, 4
    more, for each token and (local) vocabulary entry. ``chunk`` bounds the float32 part.

    Megatron's own cross entropy, which verl calls too, turns the float32 logits into the softmax and that into the
    gradient in place: nothing more (tensor_parallel/cross_entropy.py: calculate_predicted_logits, calculate_gradients).
    """
    rows = -(-shape.vocab // layout.tp)
    at_once = min(tokens, chunk) if chunk else tokens
    in_place = layout.switches.implementation in ("upstream", "verl")
    return rows * (2 * tokens + (8 if gradient and not in_place else 4) * at_once)


def in_flight(layout: TrainLayout, stage: int, num_micro_batches: int | None) -> float:
    """Micro-batches whose activations a stage holds at once under 1F1B; interleaved stages hold a share more.

    Source: Megatron-LM pipeline_parallel/schedules.py; Narayanan et al. 2021, section 2.2.
    """
    waiting = layout.pp - stage
    if num_micro_batches is not None:
        waiting = min(waiting, max(1, num_micro_batches))
    virtual = layout.virtual_stages or 1
    return waiting * (1 + (layout.pp - 1) / (layout.pp * virtual)) if virtual > 1 else float(waiting)


def _attention_widths(shape: ModelShape, layer: int) -> tuple[int, int, int, int]:
    """Features a position of queries, of keys and values, of the heads' output (all divided by tp), and of latents."""
    heads = shape.num_heads
    if shape.attention in ("mla", "mla_dsa"):
        wide = heads * (shape.qk_nope_head_dim + shape.rope_head_dim)
        values = heads * shape.v_head_dim
        latent = shape.q_lora_rank + shape.kv_lora_rank + shape.rope_head_dim
        return wide, wide + values, values, latent
    width = heads * shape.head_dim
    if shape.attention == "deepseek_v4":
        return width, 0, width + shape.o_groups * shape.o_lora_rank, shape.q_lora_rank + 2 * shape.head_dim
    kv_heads = shape.window_kv_heads if layer in shape.window_layers else shape.num_kv_heads
    return width, 2 * kv_heads * shape.head_dim, width, 0


def _feed_forward(
    shape: ModelShape, layer: int, tokens: int, layout: TrainLayout, fp8: bool, imbalance: float
) -> float:
    # Gate and up in bf16, 4 bytes together, and their product, which is the second linear's input.
    wide, narrow = (5, 1) if fp8 else (6, 2)
    if not shape.is_moe or layer < shape.dense_layers:
        return wide * tokens * shape.ffn / layout.tp
    expert_tp = layout.etp if layout.etp is not None else layout.tp
    routed = _rows(shape, tokens, layout, imbalance) * (narrow * shape.hidden + wide * shape.moe_ffn / expert_tp)
    shared = wide * tokens * shape.num_shared_experts * shape.moe_ffn / layout.tp
    return routed + shared + 8 * tokens * shape.num_experts / layout.tp


def _rows(shape: ModelShape, tokens: int, layout: TrainLayout, imbalance: float) -> float:
    """Rows that the experts of one rank compute."""
    expert_tp = layout.etp if layout.etp is not None else layout.tp
    uneven = imbalance if layout.ep > 1 else 1.0
    return uneven * shape.experts_per_token * tokens * expert_tp / layout.tp
