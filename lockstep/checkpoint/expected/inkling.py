"""Inkling: gate and up interleaved in one tensor, stacks of experts, short convolutions, windowed and global layers.

Written from the headers of thinkingmachines/Inkling-Small and Inkling (1,048 tensors in the former, 160 of them MTP
layers in ``mtp.safetensors``). Sizes are under ``text_config``; there ``intermediate_size`` is an expert's width and
``dense_intermediate_size`` the dense layers', while transformers writes them as ``moe_intermediate_size`` and
``intermediate_size``. The output head has ``vocab_size`` rows, of which ``unpadded_vocab_size`` are used.
"""

from __future__ import annotations

from lockstep.checkpoint.expected.llama import common_sizes
from lockstep.checkpoint.expected.rows import Block, Layout, Reader, Row, Sizes, linear, norm

AROUND = (
    Row("embed.weight", ("vocab", "hidden")),
    norm("embed_norm", "hidden"),
    norm("norm", "hidden"),
    Row("unembed.weight", ("vocab", "hidden")),
)
EVERY_LAYER = (
    linear("attn.wq_du", "heads*head_dim", "hidden"),
    linear("attn.wk_dv", "kv_heads*head_dim", "hidden"),
    linear("attn.wv_dv", "kv_heads*head_dim", "hidden"),
    linear("attn.wr_du", "heads*relative", "hidden"),
    linear("attn.wo_ud", "hidden", "heads*head_dim"),
    norm("attn.q_norm", "head_dim"),
    norm("attn.k_norm", "head_dim"),
    Row("attn.k_sconv.weight", ("kv_heads*head_dim", "1", "kernel")),
    Row("attn.v_sconv.weight", ("kv_heads*head_dim", "1", "kernel")),
    Row("attn.rel_logits_proj.proj", ("relative", "extent")),
    norm("attn_norm", "hidden"),
    norm("mlp_norm", "hidden"),
    Row("attn_sconv.weight", ("hidden", "1", "kernel")),
    Row("mlp_sconv.weight", ("hidden", "1", "kernel")),
)
DENSE = (
    linear("mlp.w13_dn", "2*ffn", "hidden"),
    linear("mlp.w2_md", "hidden", "ffn"),
    Row("mlp.global_scale", ("1",)),
)
SPARSE = (
    Row("mlp.gate.weight", ("all_experts", "hidden")),
    Row("mlp.gate.bias", ("experts",)),
    Row("mlp.gate.global_scale", ("1",)),
    Row("mlp.experts.w13_weight", ("experts", "2*moe_ffn", "hidden"), "expert"),
    Row("mlp.experts.w2_weight", ("experts", "hidden", "moe_ffn"), "expert"),
    Row("mlp.shared_experts.shared_w13_weight", ("shared", "2*moe_ffn", "hidden"), "linear"),
    Row("mlp.shared_experts.shared_w2_weight", ("shared", "hidden", "moe_ffn"), "linear"),
)
MTP = (norm("embed_norm", "hidden"), norm("hidden_norm", "hidden"), Row("input_proj.weight", ("hidden", "2*hidden")))
AUDIO = (Row("model.audio.encoder.weight", ("mel_bins*mel_vocab", "hidden")), norm("model.audio.final_norm", "hidden"))
_STAGES = (("128", "75"), ("320", "512"), ("4800", "5120"), ("hidden", "9600"))
"""The published vision tower: patches of 40 × 40 × 2 × 3 values folded in four stages."""
_PUBLISHED_VISION = {"patch_size": 40, "temporal_patch_size": 2, "n_channels": 3, "n_layers": 4}


def layout(read: Reader, model_type: str) -> Layout:
    """Inkling as ``config.json`` describes it: the whole model, or (``inkling_text``) its language model alone."""
    whole = model_type == "inkling_mm_model"
    text = read.section("text_config") if whole else read
    found = common_sizes(text)
    found.facts["tied_embeddings"] = False
    _experts(text, found)
    local, windowed = _local_sizes(text, found)
    dense = _dense(text, found.sizes["layers"])
    found.facts["window_layers"] = tuple(layer for layer, is_local in enumerate(windowed) if is_local)
    found.facts["dense_layers"] = sum(dense)
    blocks = [Block("model.llm.", AROUND, found.sizes)]
    for layer, is_local in enumerate(windowed):
        rows = (*EVERY_LAYER, *(DENSE if dense[layer] else SPARSE))
        blocks.append(Block(f"model.llm.layers.{layer}.", rows, local if is_local else found.sizes))
    blocks += _mtp(read, text, found, local, whole=whole)
    if whole:
        blocks += _towers(read, found)
    return Layout(blocks, found.facts)


def _experts(text: Reader, found: Sizes) -> None:
    published = text.has("dense_intermediate_size")
    found.add("ffn", text.size("dense_intermediate_size", "intermediate_size"), "ffn")
    width = text.size("moe_intermediate_size", *(("intermediate_size",) if published else ()))
    if published and text.has("intermediate_size") and text.size("intermediate_size") != width:
        text.refuse("moe_intermediate_size", f"{width} is not the experts' width in intermediate_size")
    found.add("moe_ffn", width, "moe_ffn")
    experts = found.add("experts", text.size("n_routed_experts"), "num_experts")
    shared = found.add("shared", text.size("n_shared_experts", default=2), "num_shared_experts")
    found.add("all_experts", experts + shared)
    found.facts["experts_per_token"] = text.size("num_experts_per_tok")


def _local_sizes(text: Reader, found: Sizes) -> tuple[dict[str, int], tuple[bool, ...]]:
    """Sizes of the layers with a window (``swa_…``), and which layers these are."""
    found.add("relative", text.size("d_rel", default=16), "relative_dim")
    found.add("kernel", text.size("sconv_kernel_size", "conv_kernel_size", default=4), "conv_kernel")
    found.add("head_dim", text.size("head_dim"), "head_dim")
    found.add("kv_heads", text.size("num_key_value_heads"), "num_kv_heads")
    found.add("extent", text.size("rel_extent", default=1024), "relative_extent")
    window = found.facts["sliding_window"] = text.size("sliding_window_size", "sliding_window")
    local = {
        **found.sizes,
        "heads": text.size("swa_num_attention_heads"),
        "head_dim": text.size("swa_head_dim"),
        "kv_heads": text.size("swa_num_key_value_heads"),
        "extent": window,
    }
    found.facts["window_kv_heads"] = local["kv_heads"]
    layers = found.sizes["layers"]
    types = text.per_layer("layer_types", layers, ("hybrid", "hybrid_sliding"))
    stated = None if types is None else tuple(kind == "hybrid_sliding" for kind in types)
    ids = text.layer_ids("local_layer_ids", layers)
    derived = None if ids is None else tuple(layer in ids for layer in range(layers))
    return local, text.agreed("layer_types", stated, "local_layer_ids", derived) or (False,) * layers


def _dense(text: Reader, layers: int) -> tuple[bool, ...]:
    types = text.per_layer("mlp_layer_types", layers, ("dense", "sparse"))
    stated = None if types is None else tuple(kind == "dense" for kind in types)
    first = text.size("dense_mlp_idx", least=0) if text.has("dense_mlp_idx") else None
    derived = None if first is None else tuple(layer < first for layer in range(layers))
    return text.agreed("mlp_layer_types", stated, "dense_mlp_idx", derived) or (False,) * layers


def _mtp(read: Reader, text: Reader, found: Sizes, local: dict[str, int], *, whole: bool) -> list[Block]:
    """The MTP layers: dense, windowed where ``mtp_config.local_layer_ids`` (transformers: ``mtp_local_layer_ids``)."""
    if whole and read.has("mtp_config"):
        mtp = read.section("mtp_config")
        count = mtp.count("num_nextn_predict_layers", default=0)
        ids = mtp.layer_ids("local_layer_ids", count)
    else:
        count = text.count("num_mtp_layers", default=0)
        ids = text.layer_ids("mtp_local_layer_ids", count)
    found.facts["mtp_layers"] = count
    blocks: list[Block] = []
    for layer in range(count):
        sizes = local if layer in (ids or ()) else found.sizes
        blocks.append(Block(f"model.mtp.layers.{layer}.", MTP, found.sizes, "mtp"))
        rows = (*EVERY_LAYER, *DENSE)
        blocks.append(Block(f"model.mtp.layers.{layer}.transformer_block.", rows, sizes, "mtp"))
    return blocks


def _towers(read: Reader, found: Sizes) -> list[Block]:
    """Sound and pictures. Shapes of a vision tower other than the published one are not known, only its names."""
    blocks: list[Block] = []
    if read.has("audio_config"):
        audio = read.section("audio_config")
        sizes = {
            **found.sizes,
            "mel_bins": audio.size("n_mel_bins", default=80),
            "mel_vocab": audio.size("mel_vocab_size", default=256),
        }
        blocks.append(Block("", AUDIO, sizes, "towers"))
    if read.has("vision_config"):
        vision = read.section("vision_config")
        count = vision.count("n_layers", "num_hidden_layers", least=1)
        values = {
            "patch_size": vision.size("patch_size", default=40),
            "temporal_patch_size": vision.size("temporal_patch_size", default=2),
            "n_channels": vision.size("n_channels", "num_channels", default=3),
            "n_layers": count,
        }
        blocks.append(Block("model.visual.", _vision(count, values == _PUBLISHED_VISION), found.sizes, "towers"))
    return blocks


def _vision(count: int, published: bool) -> list[Row]:
    rows = [norm("final_norm", "hidden")]
    for stage in range(count):
        dims = _STAGES[stage] if published else None
        rows.append(Row(f"layers.linear_{stage}.weight", dims))
        if stage < count - 1:
            rows.append(Row(f"layers.norm_{stage}.weight", None if dims is None else dims[:1]))
    return rows
