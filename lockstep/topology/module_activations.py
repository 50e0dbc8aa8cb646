"""What autograd keeps of a forward through transformers' own modules, which Lockstep's trainer runs: bytes per layer.

Counted from what each operation saves for its backward, with b bytes a number (2 in bf16), per position:

    two RMSNorms            2 · (4·h + 2·b·h + 4)      input in float32, normalised, output; reciprocal root
    head norms              (4 + b)·(q + kv) + 4·(heads + kv heads)      where the model has them
    attention, masked       4·b·q + 4·heads + b·n      queries, repeated keys and values, output; a bias of n columns
    attention, no mask      2·b·(q + kv) + 4·heads
    dense MLP               4·b·f
    experts                 k · (2·b·h + 4·b·f_e + b + 24) + 4·E + 8·k      rows sorted by expert; router's softmax
                            and 4·E once

and once: (4 + b)·h + 4 of the final norm, 2·b·head_dim of rotary tables, 8 of token ids. A test counts the same with
hooks on the tensors that autograd saves. Other kinds of attention are estimated by the widths that they put in these
places. With gradient checkpointing a layer keeps its input, and one layer at a time the rest.
"""

from __future__ import annotations

from lockstep.topology.records import ModelShape


def module_layer_activations(shape: ModelShape, layer: int, tokens: int, *, row: int | None, width: int = 2) -> int:
    """Bytes that the backward of decoder layer ``layer`` needs for ``tokens`` positions. ``row``: columns of the mask,
    None where attention is causal without one. ``width``: bytes of a number."""
    hidden = shape.hidden * max(1, shape.hyper_connections)
    norms = 2 * ((4 + 2 * width) * hidden + 4)
    offsets = 4 * shape.num_experts if shape.is_moe and layer >= shape.dense_layers else 0
    return round(tokens * (norms + _attention(shape, layer, row, width) + _feed_forward(shape, layer, width)) + offsets)


def module_outer_activations(shape: ModelShape, tokens: int, *, width: int = 2) -> int:
    """Bytes kept outside the layers: final norm, its output as the head's input, rotary tables, token ids."""
    per_token = (4 + width) * shape.hidden + 4 + width * shape.hidden + 2 * width * _rotary(shape) + 8
    return tokens * per_token


def module_checkpoint(shape: ModelShape, tokens: int, *, width: int = 2) -> int:
    """Bytes of one layer's input."""
    return tokens * width * shape.hidden * max(1, shape.hyper_connections)


def module_working_set(shape: ModelShape, tokens: int, *, width: int = 2, gradient: bool) -> int:
    """Bytes in use beside what is kept, while one layer runs: its largest group of tensors that live together.

    In a backward what was kept is freed as it is used, so the group is that of the operation that needs most: the
    product of gate and up, attention, the sum over a token's experts, or a norm in float32.
    """
    queries = max(_widths(shape, layer)[0] for layer in range(shape.num_layers))
    hidden = shape.hidden * max(1, shape.hyper_connections)
    dense = shape.ffn if not shape.is_moe or shape.dense_layers else 0
    wide = max(dense, shape.num_shared_experts * shape.moe_ffn)
    rows = shape.experts_per_token * width * shape.hidden
    if gradient:
        return tokens * (max(2 * width * wide, 4 * width * queries, 3 * rows, 12 * hidden) + width * hidden)
    # Attention: queries in their own dtype, in float32 and squared, for the norm of heads.
    return tokens * (max(3 * width * wide, (width + 8) * queries, 4 * rows) + 3 * width * hidden)


def head_working_set(
    shape: ModelShape, rows: int, chunk: int, *, width: int = 2, gradient: bool, float32_head: bool = False
) -> int:
    """Bytes that the chunked head (``TokenLogProbs``) holds at its peak for ``rows`` hidden rows.

    A buffer of one chunk's logits in the model's dtype and a float32 block of it; with a gradient also that of the
    weight, in the weight's dtype, and a float32 sum of it where there are several chunks.
    """
    at_once = min(rows, chunk)
    logits = at_once * shape.vocab * (width + 4)
    states = rows * shape.hidden * width
    weight = shape.vocab * shape.hidden
    copied = 4 * (weight + rows * shape.hidden) if float32_head and width != 4 else 0
    if not gradient:
        return logits + copied
    several = 0 if rows <= chunk else 4 * weight
    return logits + states + several + width * weight + copied


def _attention(shape: ModelShape, layer: int, row: int | None, width: int) -> float:
    queries, keys, values = _widths(shape, layer)
    heads = shape.num_heads
    normed = 0
    if shape.qk_norm or shape.attention == "inkling":
        normed = (4 + width) * (queries + keys) + 4 * (heads + keys // shape.head_dim)
    if row is None:
        return normed + width * (2 * queries + keys + values) + 4 * heads
    masked = width * (3 * queries + max(values, queries if shape.attention == "gqa" else values)) + width * row
    extra = _latents(shape, width)
    if shape.attention == "inkling":
        # Relative positions are a bias of its own for every head.
        extra += heads * row * width
    return normed + masked + 4 * heads + extra


def _latents(shape: ModelShape, width: int) -> int:
    """Down-projected states with their norms, which MLA and DeepSeek-V4 keep beside the heads."""
    return (4 + 2 * width) * (shape.q_lora_rank + shape.kv_lora_rank) + width * shape.rope_head_dim


def _widths(shape: ModelShape, layer: int) -> tuple[int, int, int]:
    """Features a position of queries, keys and values before they are repeated."""
    if shape.attention in ("mla", "mla_dsa"):
        wide = shape.num_heads * (shape.qk_nope_head_dim + shape.rope_head_dim)
        return wide, wide, shape.num_heads * shape.v_head_dim
    kv_heads = shape.window_kv_heads if layer in shape.window_layers else shape.num_kv_heads
    return shape.num_heads * shape.head_dim, kv_heads * shape.head_dim, kv_heads * shape.head_dim


def _rotary(shape: ModelShape) -> int:
    if shape.attention == "inkling":
        return 0
    return shape.rope_head_dim or shape.head_dim


def _feed_forward(shape: ModelShape, layer: int, width: int) -> float:
    if not shape.is_moe or layer < shape.dense_layers:
        return 4 * width * shape.ffn
    row = 2 * width * shape.hidden + 4 * width * shape.moe_ffn + width + 24
    shared = 4 * width * shape.num_shared_experts * shape.moe_ffn
    return shape.experts_per_token * (row + 8) + 4 * shape.num_experts + shared
