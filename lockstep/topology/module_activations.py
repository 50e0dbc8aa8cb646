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
hooks on the tensors that autograd saves. Other kinds of attention: module_attention.py. With gradient checkpointing a
layer keeps its input, and one layer at a time the rest.
"""

from __future__ import annotations

from lockstep.topology.module_attention import (
    attention_activations,
    expert_activations,
    hyper_connection_activations,
    query_width,
    router_activations,
)
from lockstep.topology.records import ModelShape


def module_layer_activations(shape: ModelShape, layer: int, tokens: int, *, row: int | None, width: int = 2) -> int:
    """Bytes that the backward of decoder layer ``layer`` needs for ``tokens`` positions. ``row``: columns of the mask,
    None where attention is causal without one. ``width``: bytes of a number."""
    norms = 2 * ((4 + 2 * width) * shape.hidden + 4)
    streams = hyper_connection_activations(shape, width)
    mixed = attention_activations(shape, layer, row, width)
    if not shape.is_moe or layer < shape.dense_layers:
        return round(tokens * (norms + streams + mixed + 4 * width * shape.ffn))
    routed, shared = expert_activations(shape, width)
    experts = shape.experts_per_token * routed + shared + router_activations(shape)
    # Once: where each expert's rows end, and the router's weight in float32 where it runs in it.
    once = 4 * shape.num_experts * (1 + (shape.hidden if shape.attention in ("mla", "mla_dsa") else 0))
    return round(tokens * (norms + streams + mixed + experts) + once)


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
    queries = query_width(shape)
    hidden = shape.hidden * max(1, shape.hyper_connections)
    dense = shape.ffn if not shape.is_moe or shape.dense_layers else 0
    wide = max(dense, shape.num_shared_experts * shape.moe_ffn)
    rows = shape.experts_per_token * width * shape.hidden
    if gradient:
        return tokens * (max(2 * width * wide, 4 * width * queries, 3 * rows, 12 * hidden) + width * hidden)
    # Attention: queries in their own dtype, in float32 and squared, for the norm of heads.
    return tokens * (max(3 * width * wide, (width + 8) * queries, 4 * rows) + 3 * width * hidden)


def head_working_set(
    shape: ModelShape, rows: int, chunk: int, *, width: int = 2, gradient: bool, block_elements: int | None = None
) -> int:
    """Bytes that the chunked head (``TokenLogProbs``) holds at its peak for ``rows`` hidden rows.

    A buffer of one chunk's logits in the model's dtype and a float32 block of it; with a gradient also that of the
    weight, in the weight's dtype, and a float32 sum of it where there are several chunks. ``block_elements`` bounds the
    float32 block (on a CPU: whole rows within 4 Mi elements).
    """
    at_once = min(rows, chunk)
    block = at_once if block_elements is None else min(at_once, max(1, block_elements // shape.vocab))
    logits = shape.vocab * (width * at_once + 4 * block)
    if not gradient:
        return logits
    weight = shape.vocab * shape.hidden
    several = 0 if rows <= chunk else 4 * weight
    return logits + rows * shape.hidden * width + several + width * weight


def _rotary(shape: ModelShape) -> int:
    if shape.attention == "inkling":
        return 0
    return shape.rope_head_dim or shape.head_dim
