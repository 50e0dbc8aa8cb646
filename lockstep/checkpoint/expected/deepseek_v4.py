"""DeepSeek-V4 under the names of its reference code: hyper-connections, compressed attention, hash-routed layers, MTP.

Written from the headers of deepseek-ai/DeepSeek-V4-Pro (145,116 tensors, the experts packed) and -Flash, and their
``inference/model.py``. ``compress_ratios`` has an entry for each layer and one for each MTP layer: 0 attends within the
window only, 4 has a compressor of overlapping windows and an indexer, 128 a compressor. The first ``num_hash_layers``
layers route by token id (``tid2eid``) and have no routing bias. ``wo_a`` is stored as one matrix of all groups.
"""

from __future__ import annotations

from typing import Any

from lockstep.checkpoint.expected.llama import common_sizes
from lockstep.checkpoint.expected.rows import Block, Layout, Reader, Row, linear, norm

_HC_HEAD = (
    Row("hc_head_fn", ("streams", "streams*hidden")),
    Row("hc_head_base", ("streams",)),
    Row("hc_head_scale", ("1",)),
)
AROUND = (Row("embed.weight", ("vocab", "hidden")), norm("norm", "hidden"), *_HC_HEAD)
HEAD = (Row("head.weight", ("vocab", "hidden")),)
EVERY_LAYER = (
    *(
        Row(f"hc_{part}_{name}", dims)
        for part in ("attn", "ffn")
        for name, dims in (("fn", ("mixes", "streams*hidden")), ("base", ("mixes",)), ("scale", ("3",)))
    ),
    norm("attn_norm", "hidden"),
    norm("ffn_norm", "hidden"),
    Row("attn.attn_sink", ("heads",)),
    linear("attn.wq_a", "q_lora", "hidden"),
    norm("attn.q_norm", "q_lora"),
    linear("attn.wq_b", "heads*head_dim", "q_lora"),
    linear("attn.wkv", "head_dim", "hidden"),
    norm("attn.kv_norm", "head_dim"),
    linear("attn.wo_a", "o_groups*o_lora", "group_dim"),
    linear("attn.wo_b", "hidden", "o_groups*o_lora"),
    Row("ffn.gate.weight", ("experts", "hidden")),
    Row("ffn.experts.{e}.w1.weight", ("moe_ffn", "hidden"), "expert"),
    Row("ffn.experts.{e}.w2.weight", ("hidden", "moe_ffn"), "expert"),
    Row("ffn.experts.{e}.w3.weight", ("moe_ffn", "hidden"), "expert"),
    linear("ffn.shared_experts.w1", "shared_ffn", "hidden"),
    linear("ffn.shared_experts.w2", "hidden", "shared_ffn"),
    linear("ffn.shared_experts.w3", "shared_ffn", "hidden"),
)
ROUTING = {
    "hash": (Row("ffn.gate.tid2eid", ("vocab", "top_k"), "ids"),),
    "scored": (Row("ffn.gate.bias", ("experts",)),),
}


def _compressor(at: str, ratio: str, width: str, head: str) -> tuple[Row, ...]:
    return (
        Row(f"{at}.wkv.weight", (width, "hidden")),
        Row(f"{at}.wgate.weight", (width, "hidden")),
        Row(f"{at}.ape", (ratio, width)),
        norm(f"{at}.norm", head),
    )


BY_RATIO = {
    "window": (),
    "sparse": (
        *_compressor("attn.compressor", "sparse_ratio", "2*head_dim", "head_dim"),
        linear("attn.indexer.wq_b", "index_heads*index_dim", "q_lora"),
        Row("attn.indexer.weights_proj.weight", ("index_heads", "hidden")),
        *_compressor("attn.indexer.compressor", "sparse_ratio", "2*index_dim", "index_dim"),
    ),
    "heavy": _compressor("attn.compressor", "heavy_ratio", "head_dim", "head_dim"),
}
MTP = (
    linear("e_proj", "hidden", "hidden"),
    linear("h_proj", "hidden", "hidden"),
    norm("enorm", "hidden"),
    norm("hnorm", "hidden"),
    norm("norm", "hidden"),
    *_HC_HEAD,
)
_KIND = {0: "window", 4: "sparse", 128: "heavy"}
_LAYER_TYPES = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}


def layout(read: Reader, _model_type: str) -> Layout:
    """DeepSeek-V4 as ``config.json`` describes it, the published one or transformers'."""
    found = common_sizes(read)
    found.facts["num_kv_heads"] = read.size("num_key_value_heads", default=1)
    found.add("head_dim", read.size("head_dim"), "head_dim")
    found.add("q_lora", read.size("q_lora_rank"), "q_lora_rank")
    groups = found.add("o_groups", read.size("o_groups"), "o_groups")
    found.add("o_lora", read.size("o_lora_rank"), "o_lora_rank")
    width = found.sizes["heads"] * found.sizes["head_dim"]
    if width % groups:
        read.refuse("o_groups", f"{groups} does not divide the {width} outputs of the heads")
    found.add("group_dim", max(1, width // groups))
    found.add("index_heads", read.size("index_n_heads"), "indexer_heads")
    found.add("index_dim", read.size("index_head_dim"), "indexer_head_dim")
    found.facts["indexer_topk"] = read.size("index_topk")
    if read.has("qk_rope_head_dim"):  # transformers writes partial_rotary_factor instead
        found.facts["rope_head_dim"] = read.size("qk_rope_head_dim")
    found.facts["sliding_window"] = read.size("sliding_window")
    found.add("experts", read.size("n_routed_experts"), "num_experts")
    found.add("top_k", read.size("num_experts_per_tok"), "experts_per_token")
    found.add("moe_ffn", read.size("moe_intermediate_size"), "moe_ffn")
    shared = read.size("n_shared_experts", default=1)
    found.facts["num_shared_experts"] = shared
    found.add("shared_ffn", shared * found.sizes["moe_ffn"])
    streams = found.add("streams", read.size("hc_mult"), "hyper_connections")
    found.add("mixes", (2 + streams) * streams)
    layers = found.sizes["layers"]
    mtp = found.facts["mtp_layers"] = read.count("num_nextn_predict_layers", default=0)
    kinds, hashed = _kinds(read, layers, mtp, found.sizes, found.facts), _hashed(read, layers)
    found.facts["hash_layers"] = sum(hashed)
    head = () if found.facts["tied_embeddings"] else HEAD
    blocks = [Block("", (*AROUND, *head), found.sizes)]
    for layer in range(layers):
        rows = (*EVERY_LAYER, *BY_RATIO[kinds[layer]], *ROUTING["hash" if hashed[layer] else "scored"])
        blocks.append(Block(f"layers.{layer}.", rows, found.sizes))
    for extra in range(mtp):
        rows = (*EVERY_LAYER, *BY_RATIO[kinds[layers + extra]], *ROUTING["scored"], *MTP)
        blocks.append(Block(f"mtp.{extra}.", rows, found.sizes, "mtp"))
    return Layout(blocks, found.facts)


def _kinds(read: Reader, layers: int, mtp: int, sizes: dict[str, int], facts: dict[str, Any]) -> tuple[str, ...]:
    """What each layer's attention is, the MTP layers' at the end (the window alone unless stated)."""
    rates = read.config.get("compress_rates") or {}
    rates = Reader(rates if isinstance(rates, dict) else {}, read.problems, "compress_rates.")
    sizes["sparse_ratio"] = rates.size("compressed_sparse_attention", default=4)
    sizes["heavy_ratio"] = rates.size("heavily_compressed_attention", default=128)
    value = read.config.get("compress_ratios")
    length = layers + mtp if isinstance(value, list) and len(value) == layers + mtp else layers
    ratios = read.per_layer("compress_ratios", length, tuple(_KIND))
    types = read.per_layer("layer_types", layers, tuple(_LAYER_TYPES))
    stated = None if ratios is None else tuple(_KIND[ratio] for ratio in ratios)
    derived = None if types is None else tuple(_LAYER_TYPES[kind] for kind in types)
    own = read.agreed("compress_ratios", None if stated is None else stated[:layers], "layer_types", derived)
    own = own or ("window",) * layers
    number = {"window": 0, "sparse": sizes["sparse_ratio"], "heavy": sizes["heavy_ratio"]}
    facts["compress_ratios"] = tuple(number[kind] for kind in own)
    behind = () if stated is None else stated[layers:]
    return (*own, *(behind or ("window",) * mtp))


def _hashed(read: Reader, num_layers: int) -> tuple[bool, ...]:
    types = read.per_layer("mlp_layer_types", num_layers, ("hash_moe", "moe"))
    stated = None if types is None else tuple(kind == "hash_moe" for kind in types)
    first = read.size("num_hash_layers", least=0) if read.has("num_hash_layers") else None
    derived = None if first is None else tuple(layer < first for layer in range(num_layers))
    return read.agreed("num_hash_layers", derived, "mlp_layer_types", stated) or (False,) * num_layers
