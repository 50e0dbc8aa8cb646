"""GLM-5 (``glm_moe_dsa``): latent attention, an indexer on some layers, leading dense layers, an MTP layer.

Written from the headers of zai-org/GLM-5.2 and GLM-5.2-FP8 (118,629 tensors). The indexer is there on layers 0, 1, 2,
6, 10, … (``indexer_types`` "full"); a layer between uses the last one's choice of tokens and has no indexer weights.
The MTP layer is stored as the layer after the last, with an indexer, experts and four tensors of its own, and shares
embedding and head.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.checkpoint.expected.llama import MLP, NORMS, around, common_sizes
from lockstep.checkpoint.expected.rows import Block, Layout, Reader, Row, linear, norm

ATTENTION = (
    linear("self_attn.q_a_proj", "q_lora", "hidden"),
    norm("self_attn.q_a_layernorm", "q_lora"),
    linear("self_attn.q_b_proj", "heads*qk_dim", "q_lora"),
    linear("self_attn.kv_a_proj_with_mqa", "latent", "hidden"),
    norm("self_attn.kv_a_layernorm", "kv_lora"),
    linear("self_attn.kv_b_proj", "heads*kv_dim", "kv_lora"),
    linear("self_attn.o_proj", "hidden", "heads*v_dim"),
)
BIAS = (
    Row("self_attn.q_a_proj.bias", ("q_lora",)),
    Row("self_attn.kv_a_proj_with_mqa.bias", ("latent",)),
    Row("self_attn.o_proj.bias", ("hidden",)),
)
INDEXER = (
    linear("self_attn.indexer.wq_b", "index_heads*index_dim", "q_lora"),
    linear("self_attn.indexer.wk", "index_dim", "hidden"),
    norm("self_attn.indexer.k_norm", "index_dim"),
    Row("self_attn.indexer.k_norm.bias", ("index_dim",)),
    Row("self_attn.indexer.weights_proj.weight", ("index_heads", "hidden")),
)
SPARSE = (
    Row("mlp.gate.weight", ("experts", "hidden")),
    Row("mlp.gate.e_score_correction_bias", ("experts",)),
    Row("mlp.experts.{e}.gate_proj.weight", ("moe_ffn", "hidden"), "expert"),
    Row("mlp.experts.{e}.up_proj.weight", ("moe_ffn", "hidden"), "expert"),
    Row("mlp.experts.{e}.down_proj.weight", ("hidden", "moe_ffn"), "expert"),
    linear("mlp.shared_experts.gate_proj", "shared_ffn", "hidden"),
    linear("mlp.shared_experts.up_proj", "shared_ffn", "hidden"),
    linear("mlp.shared_experts.down_proj", "hidden", "shared_ffn"),
)
MTP = (
    Row("eh_proj.weight", ("hidden", "2*hidden")),
    norm("enorm", "hidden"),
    norm("hnorm", "hidden"),
    norm("shared_head.norm", "hidden"),
)


def layout(read: Reader, _model_type: str) -> Layout:
    """GLM-5 as ``config.json`` describes it."""
    found = common_sizes(read)
    nope, rope = read.size("qk_nope_head_dim"), read.size("qk_rope_head_dim")
    found.add("q_lora", read.size("q_lora_rank"), "q_lora_rank")
    found.add("kv_lora", read.size("kv_lora_rank"), "kv_lora_rank")
    found.add("v_dim", read.size("v_head_dim"), "v_head_dim")
    found.facts |= {"qk_nope_head_dim": nope, "rope_head_dim": rope, "head_dim": nope + rope}
    found.add("qk_dim", nope + rope)
    found.add("latent", found.sizes["kv_lora"] + rope)
    found.add("kv_dim", nope + found.sizes["v_dim"])
    found.add("index_heads", read.size("index_n_heads"), "indexer_heads")
    found.add("index_dim", read.size("index_head_dim"), "indexer_head_dim")
    found.facts["num_kv_heads"] = read.size("num_key_value_heads", default=found.sizes["heads"])
    found.facts["indexer_topk"] = read.size("index_topk")
    found.add("ffn", read.size("intermediate_size"), "ffn")
    found.add("moe_ffn", read.size("moe_intermediate_size"), "moe_ffn")
    found.add("experts", read.size("n_routed_experts", "num_experts"), "num_experts")
    found.facts["experts_per_token"] = read.size("num_experts_per_tok")
    shared = read.size("n_shared_experts")
    found.add("shared_ffn", shared * found.sizes["moe_ffn"])
    found.facts["num_shared_experts"] = shared
    layers = found.sizes["layers"]
    mtp = found.facts["mtp_layers"] = read.count("num_nextn_predict_layers", default=0)
    dense, full = _dense(read, layers), _indexers(read, layers)
    found.facts["dense_layers"] = sum(dense)
    found.facts["index_layers"] = tuple(layer for layer in range(layers) if full[layer])
    attention = (*NORMS, *ATTENTION, *(BIAS if read.flag("attention_bias") else ()))
    blocks = [around(found)]
    for layer in range(layers):
        rows = (*attention, *(INDEXER if full[layer] else ()), *(MLP if dense[layer] else SPARSE))
        blocks.append(Block(f"model.layers.{layer}.", rows, found.sizes))
    rows = (*attention, *INDEXER, *SPARSE, *MTP)
    blocks += [Block(f"model.layers.{layer}.", rows, found.sizes, "mtp") for layer in range(layers, layers + mtp)]
    return Layout(blocks, found.facts)


def _dense(read: Reader, num_layers: int) -> Sequence[bool]:
    """Which layers have one MLP, as ``mlp_layer_types`` and ``first_k_dense_replace`` say."""
    types = read.per_layer("mlp_layer_types", num_layers, ("dense", "sparse"))
    stated = None if types is None else tuple(kind == "dense" for kind in types)
    first = read.size("first_k_dense_replace", least=0) if read.has("first_k_dense_replace") else None
    derived = None if first is None else tuple(layer < first for layer in range(num_layers))
    return read.agreed("mlp_layer_types", stated, "first_k_dense_replace", derived) or (False,) * num_layers


def _indexers(read: Reader, num_layers: int) -> Sequence[bool]:
    """Which layers own an indexer: ``indexer_types``, and the schedule or pattern that engines read instead."""
    types = read.per_layer("indexer_types", num_layers, ("full", "shared"))
    stated = None if types is None else tuple(kind == "full" for kind in types)
    derived = _schedule(read, num_layers)
    result = read.agreed("indexer_types", stated, "index_topk_freq", derived) or (True,) * num_layers
    if not result[0]:
        read.refuse("indexer_types", "the first layer must be full: none is before it whose choice it could share")
    return result


def _schedule(read: Reader, num_layers: int) -> tuple[bool, ...] | None:
    pattern = read.config.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != num_layers or set(pattern) - {"F", "S"}:
            read.refuse("index_topk_pattern", f"must be {num_layers} letters F (full) or S (shared)")
            return None
        return tuple(letter == "F" for letter in pattern)
    if not read.has("index_topk_freq"):
        return None
    period, offset = read.size("index_topk_freq"), read.size("index_skip_topk_offset", default=2, least=0)
    return tuple(max(layer - offset + 1, 0) % period == 0 for layer in range(num_layers))
