"""Small checkpoints in the layouts in which the models are published, written by hand from the published files.

Nothing of ours is used to make them: names, shapes and dtypes are spelled out per family, weights are quantised by
naive loops, and safetensors' own writer writes them. So they can be held against everything that reads checkpoints.

    folder = write_checkpoint(tmp_path, "deepseek_v4_flash")            # config.json, 3 shards, their index
    config, tensors = make_checkpoint("glm_moe_dsa", num_hidden_layers=7)

Sources: the safetensors headers and config.json of deepseek-ai/DeepSeek-V4-Flash and -Pro, sgl-project's FP8 form of
the former, zai-org/GLM-5.2 and its FP8 form, thinkingmachines/Inkling-Small, Qwen/Qwen3-30B-A3B, and Llama.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Maker:
    """Random tensors under their names, reproducible by seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.tensors: Tensors = {}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random) * 0.05

    def weight(self, name: str, *shape: int) -> None:
        self.tensors[name] = self.normal(*shape).to(self.dtype)

    def norm(self, name: str, size: int) -> None:
        self.tensors[name] = (1 + self.normal(size)).to(self.dtype)

    def precise(self, name: str, *shape: int) -> None:
        """A tensor that is published in float32."""
        self.tensors[name] = self.normal(*shape)

    def fp8(self, module: str, rows: int, columns: int, scale_suffix: str, scale_dtype: torch.dtype) -> None:
        """``module.weight`` in e4m3 with one scale a block of 128 × 128, tails included."""
        weight = self.normal(rows, columns)
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scales = torch.empty(math.ceil(rows / 128), math.ceil(columns / 128))
        for r in range(scales.shape[0]):
            for c in range(scales.shape[1]):
                block = weight[128 * r : 128 * (r + 1), 128 * c : 128 * (c + 1)]
                scale = float(block.abs().max()) / 448
                if scale_dtype == torch.float8_e8m0fnu:
                    scale = 2.0 ** math.ceil(math.log2(scale))
                scales[r, c] = scale
                codes[128 * r : 128 * (r + 1), 128 * c : 128 * (c + 1)] = (block / scale).to(torch.float8_e4m3fn)
        self.tensors[f"{module}.weight"] = codes
        self.tensors[f"{module}.{scale_suffix}"] = scales.to(scale_dtype)

    def fp4(self, module: str, rows: int, columns: int) -> None:
        """``module.weight`` as int8 bytes of two e2m1 codes (low nibble first), ``module.scale`` in e8m0 a block of
        1 × 32."""
        weight = self.normal(rows, columns).view(rows, columns // 32, 32)
        scale = torch.exp2(torch.ceil(torch.log2(weight.abs().amax(-1, keepdim=True) / 6)))
        distance = ((weight / scale).abs()[..., None] - torch.tensor(E2M1)).abs()
        codes = distance.argmin(-1) + 8 * (weight < 0)
        codes = codes.view(rows, columns).to(torch.uint8)
        self.tensors[f"{module}.weight"] = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
        self.tensors[f"{module}.scale"] = scale.view(rows, columns // 32).to(torch.float8_e8m0fnu)


# --- llama and Qwen3-MoE ----------------------------------------------------------------------------------------------


def _around(make: Maker, config: Config, *, tied: bool = False) -> None:
    make.weight("model.embed_tokens.weight", config["vocab_size"], config["hidden_size"])
    make.norm("model.norm.weight", config["hidden_size"])
    if not tied:
        make.weight("lm_head.weight", config["vocab_size"], config["hidden_size"])


def _grouped_attention(make: Maker, at: str, config: Config, *, head_norms: bool) -> None:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    make.norm(at + "input_layernorm.weight", hidden)
    make.norm(at + "post_attention_layernorm.weight", hidden)
    make.weight(at + "self_attn.q_proj.weight", queries, hidden)
    make.weight(at + "self_attn.k_proj.weight", keys, hidden)
    make.weight(at + "self_attn.v_proj.weight", keys, hidden)
    make.weight(at + "self_attn.o_proj.weight", hidden, queries)
    if head_norms:
        make.norm(at + "self_attn.q_norm.weight", head)
        make.norm(at + "self_attn.k_norm.weight", head)


def _gated(make: Callable[[str, int, int], None], at: str, hidden: int, width: int) -> None:
    make(at + "gate_proj", width, hidden)
    make(at + "up_proj", width, hidden)
    make(at + "down_proj", hidden, width)


def llama(make: Maker, *, tied: bool = False, **changes: Any) -> Config:
    """Llama; ``tied`` without an output head of its own."""
    config: Config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 99,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **changes,
    }
    _around(make, config, tied=tied)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        _grouped_attention(make, at, config, head_norms=False)
        _gated(_plain(make), at + "mlp.", config["hidden_size"], config["intermediate_size"])
    return config


def _plain(make: Maker) -> Callable[[str, int, int], None]:
    return lambda module, rows, columns: make.weight(f"{module}.weight", rows, columns)


def qwen3_moe(make: Maker, **changes: Any) -> Config:
    """Qwen3-30B-A3B: every layer sparse, one tensor for each projection of each expert."""
    config: Config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "max_window_layers": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": 99,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **changes,
    }
    _around(make, config)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        _grouped_attention(make, at, config, head_norms=True)
        make.weight(at + "mlp.gate.weight", config["num_experts"], config["hidden_size"])
        for expert in range(config["num_experts"]):
            _gated(_plain(make), f"{at}mlp.experts.{expert}.", config["hidden_size"], config["moe_intermediate_size"])
    return config


# --- GLM-5 ------------------------------------------------------------------------------------------------------------


def glm_moe_dsa(make: Maker, *, fp8: bool = False, **changes: Any) -> Config:
    """GLM-5.2: 3 dense layers, indexers on layers 0, 1, 2 and then every fourth, an MTP layer after the last."""
    layers = changes.get("num_hidden_layers", 7)
    config: Config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "dtype": "bfloat16",
        "hidden_size": 64,
        "intermediate_size": 160,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 3,
        "mlp_layer_types": ["dense"] * min(3, layers) + ["sparse"] * (layers - 3),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 64,
        "index_head_dim": 32,
        "index_topk": 8,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_topk_pattern": None,
        "indexer_types": ["full" if max(layer - 2, 0) % 4 == 0 else "shared" for layer in range(layers)],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "vocab_size": 99,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        **changes,
    }
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": sorted(_glm_excluded(config)),
        }
    _around(make, config)
    for layer in range(layers + config["num_nextn_predict_layers"]):
        _glm_layer(make, config, layer, mtp=layer >= layers, fp8=fp8)
    return config


def _glm_excluded(config: Config) -> Iterator[str]:
    layers = config["num_hidden_layers"]
    yield from ("lm_head", "model.embed_tokens", "model.norm")
    for layer in range(layers + config["num_nextn_predict_layers"]):
        at = f"model.layers.{layer}."
        yield from (at + "input_layernorm", at + "post_attention_layernorm")
        yield from (at + "self_attn.q_a_layernorm", at + "self_attn.kv_a_layernorm")
        if layer >= config["first_k_dense_replace"]:
            yield from (at + "mlp.gate", at + "mlp.gate.e_score_correction_bias")
        if layer >= layers:
            yield from (at + "eh_proj", at + "enorm", at + "hnorm", at + "shared_head.norm")
        if layer >= layers or config["indexer_types"][layer] == "full":
            # The published list has this name for weights_proj, which is in no checkpoint.
            yield from (at + "self_attn.indexers_proj", at + "self_attn.indexer.k_norm")


def _glm_layer(make: Maker, config: Config, layer: int, *, mtp: bool, fp8: bool) -> None:
    at, hidden, heads = f"model.layers.{layer}.", config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query_rank, latent = config["q_lora_rank"], config["kv_lora_rank"]

    def linear(module: str, rows: int, columns: int) -> None:
        if fp8:
            make.fp8(module, rows, columns, "weight_scale_inv", torch.float32)
        else:
            make.weight(f"{module}.weight", rows, columns)

    make.norm(at + "input_layernorm.weight", hidden)
    make.norm(at + "post_attention_layernorm.weight", hidden)
    linear(at + "self_attn.q_a_proj", query_rank, hidden)
    make.norm(at + "self_attn.q_a_layernorm.weight", query_rank)
    linear(at + "self_attn.q_b_proj", heads * (nope + rope), query_rank)
    linear(at + "self_attn.kv_a_proj_with_mqa", latent + rope, hidden)
    make.norm(at + "self_attn.kv_a_layernorm.weight", latent)
    linear(at + "self_attn.kv_b_proj", heads * (nope + value), latent)
    linear(at + "self_attn.o_proj", hidden, heads * value)
    if mtp or config["indexer_types"][layer] == "full":
        index = at + "self_attn.indexer."
        linear(index + "wq_b", config["index_n_heads"] * config["index_head_dim"], query_rank)
        linear(index + "wk", config["index_head_dim"], hidden)
        make.norm(index + "k_norm.weight", config["index_head_dim"])
        make.weight(index + "k_norm.bias", config["index_head_dim"])
        make.weight(index + "weights_proj.weight", config["index_n_heads"], hidden)
    if layer < config["first_k_dense_replace"]:
        _gated(linear, at + "mlp.", hidden, config["intermediate_size"])
    else:
        make.weight(at + "mlp.gate.weight", config["n_routed_experts"], hidden)
        make.precise(at + "mlp.gate.e_score_correction_bias", config["n_routed_experts"])
        for owner in (*(f"experts.{e}" for e in range(config["n_routed_experts"])), "shared_experts"):
            _gated(linear, f"{at}mlp.{owner}.", hidden, config["moe_intermediate_size"])
    if mtp:
        make.weight(at + "eh_proj.weight", hidden, 2 * hidden)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            make.norm(f"{at}{norm}.weight", hidden)


# --- DeepSeek-V4 ------------------------------------------------------------------------------------------------------


def deepseek_v4(make: Maker, *, form: str = "flash", **changes: Any) -> Config:
    """DeepSeek-V4 under the names of its reference code. ``form``: ``flash`` as published (fp8 linears, fp4 experts,
    e8m0 ``X.scale``), ``fp8`` as repackaged (all fp8, float32 ``X.weight_scale_inv``), ``plain`` without quantisation.
    """
    config = _v4_config(form, changes)
    layers = config["num_hidden_layers"]
    hidden, streams = config["hidden_size"], config["hc_mult"]
    make.weight("embed.weight", config["vocab_size"], hidden)
    make.norm("norm.weight", hidden)
    make.weight("head.weight", config["vocab_size"], hidden)
    _hc_head(make, "", hidden, streams)
    for layer in range(layers):
        _v4_layer(make, config, f"layers.{layer}.", layer, form)
    for extra in range(config["num_nextn_predict_layers"]):
        at = f"mtp.{extra}."
        _v4_layer(make, config, at, layers + extra, form)
        linear = _v4_linear(make, form)
        linear(at + "e_proj", hidden, hidden)
        linear(at + "h_proj", hidden, hidden)
        for norm in ("enorm", "hnorm", "norm"):
            make.norm(f"{at}{norm}.weight", hidden)
        _hc_head(make, at, hidden, streams)
    return config


def _v4_config(form: str, changes: Config) -> Config:
    layers = changes.get("num_hidden_layers", 5)
    config: Config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "hc_eps": 1e-6,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 20,
        "head_dim": 32,
        "hidden_size": 192,
        "index_head_dim": 32,
        "index_n_heads": 64,
        "index_topk": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_hash_layers": 3,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_groups": 2,
        "o_lora_rank": 16,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 16,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "vocab_size": 99,
        "max_position_embeddings": 512,
        # Of each layer, and of the MTP layer behind them.
        "compress_ratios": [*([0, 0, *([4, 128] * layers)][:layers]), 0],
        **changes,
    }
    if form != "plain":
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            **({"scale_fmt": "ue8m0"} if form == "flash" else {}),
        }
        config["expert_dtype"] = "fp4" if form == "flash" else "fp8"
    return config


def _hc_head(make: Maker, at: str, hidden: int, streams: int) -> None:
    make.precise(at + "hc_head_fn", streams, streams * hidden)
    make.precise(at + "hc_head_base", streams)
    make.precise(at + "hc_head_scale", 1)


def _v4_linear(make: Maker, form: str) -> Callable[[str, int, int], None]:
    def linear(module: str, rows: int, columns: int) -> None:
        if form == "flash":
            make.fp8(module, rows, columns, "scale", torch.float8_e8m0fnu)
        elif form == "fp8":
            make.fp8(module, rows, columns, "weight_scale_inv", torch.float32)
        else:
            make.weight(f"{module}.weight", rows, columns)

    return linear


def _compressor(make: Maker, at: str, hidden: int, head: int, ratio: int) -> None:
    width = head * (2 if ratio == 4 else 1)  # windows overlap at ratio 4
    make.weight(at + "wkv.weight", width, hidden)
    make.weight(at + "wgate.weight", width, hidden)
    make.precise(at + "ape", ratio, width)
    make.norm(at + "norm.weight", head)


def _v4_layer(make: Maker, config: Config, at: str, index: int, form: str) -> None:
    hidden, heads, head = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    query_rank, groups, rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    streams, ratio, linear = config["hc_mult"], config["compress_ratios"][index], _v4_linear(make, form)
    for part in ("attn", "ffn"):
        make.precise(f"{at}hc_{part}_fn", (2 + streams) * streams, streams * hidden)
        make.precise(f"{at}hc_{part}_base", (2 + streams) * streams)
        make.precise(f"{at}hc_{part}_scale", 3)
        make.norm(f"{at}{part}_norm.weight", hidden)
    make.precise(at + "attn.attn_sink", heads)
    linear(at + "attn.wq_a", query_rank, hidden)
    make.norm(at + "attn.q_norm.weight", query_rank)
    linear(at + "attn.wq_b", heads * head, query_rank)
    linear(at + "attn.wkv", head, hidden)
    make.norm(at + "attn.kv_norm.weight", head)
    linear(at + "attn.wo_a", groups * rank, heads * head // groups)
    linear(at + "attn.wo_b", hidden, groups * rank)
    if ratio:
        _compressor(make, at + "attn.compressor.", hidden, head, ratio)
    if ratio == 4:
        indexer = at + "attn.indexer."
        linear(indexer + "wq_b", config["index_n_heads"] * config["index_head_dim"], query_rank)
        make.weight(indexer + "weights_proj.weight", config["index_n_heads"], hidden)
        _compressor(make, indexer + "compressor.", hidden, config["index_head_dim"], ratio)
    experts, width, vocab = config["n_routed_experts"], config["moe_intermediate_size"], config["vocab_size"]
    make.weight(at + "ffn.gate.weight", experts, hidden)
    if index < config["num_hash_layers"]:
        ids = torch.randint(experts, (vocab, config["num_experts_per_tok"]), generator=make.random)
        make.tensors[at + "ffn.gate.tid2eid"] = ids
    else:
        make.precise(at + "ffn.gate.bias", experts)
    for owner in (*(f"experts.{e}" for e in range(experts)), "shared_experts"):
        for name, rows, columns in (("w1", width, hidden), ("w2", hidden, width), ("w3", width, hidden)):
            packed = form == "flash" and owner != "shared_experts"
            (make.fp4 if packed else linear)(f"{at}ffn.{owner}.{name}", rows, columns)


# --- Inkling ----------------------------------------------------------------------------------------------------------


def inkling(make: Maker, *, towers: bool = False, **changes: Any) -> Config:
    """Inkling: gate and up interleaved in one tensor, stacks of experts, MTP layers apart. ``changes`` are of
    ``text_config``. ``towers``: with the published towers for pictures (25 million weights) and sound."""
    config = _inkling_config(changes)
    text = config["text_config"]
    layers = text["num_hidden_layers"]
    hidden = text["hidden_size"]
    make.weight("model.llm.embed.weight", text["vocab_size"], hidden)
    make.norm("model.llm.embed_norm.weight", hidden)
    make.norm("model.llm.norm.weight", hidden)
    make.weight("model.llm.unembed.weight", text["vocab_size"], hidden)
    for layer in range(layers):
        at = f"model.llm.layers.{layer}."
        _inkling_block(make, text, at, local=layer in text["local_layer_ids"])
        (_inkling_dense if layer < text["dense_mlp_idx"] else _inkling_sparse)(make, text, at)
    for extra in range(config["mtp_config"]["num_nextn_predict_layers"]):
        at = f"model.mtp.layers.{extra}."
        make.norm(at + "embed_norm.weight", hidden)
        make.norm(at + "hidden_norm.weight", hidden)
        make.weight(at + "input_proj.weight", hidden, 2 * hidden)
        _inkling_block(make, text, at + "transformer_block.", local=extra in config["mtp_config"]["local_layer_ids"])
        _inkling_dense(make, text, at + "transformer_block.")
    if towers:
        _inkling_towers(make, hidden)
    return config


def _inkling_config(changes: Config) -> Config:
    layers = changes.get("num_hidden_layers", 7)
    text: Config = {
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "vocab_size": 99,
        "unpadded_vocab_size": 95,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "d_rel": 8,
        "rel_extent": 32,
        "sliding_window_size": 8,
        "local_layer_ids": [layer for layer in range(layers) if layer % 6 != 5],
        "dense_mlp_idx": 2,
        "dense_intermediate_size": 96,
        "intermediate_size": 32,  # of an expert, in the published file
        "moe_intermediate_size": 32,
        "sconv_kernel_size": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "route_scale": 8.0,
        "rms_norm_eps": 1e-6,
        "logits_mup_width_multiplier": 1.0,
        "model_max_length": 512,
        "torch_dtype": "bfloat16",
        **changes,
    }
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "text_config": text,
        "mtp_config": {"num_nextn_predict_layers": 2, "chain_hidden_post_norm": False, "local_layer_ids": [0]},
        "audio_config": {"decoder_dmodel": text["hidden_size"], "n_mel_bins": 80, "mel_vocab_size": 16},
        "vision_config": {
            "decoder_dmodel": text["hidden_size"],
            "patch_size": 40,
            "temporal_patch_size": 2,
            "n_channels": 3,
            "n_layers": 4,
        },
    }


def _inkling_block(make: Maker, text: Config, at: str, *, local: bool) -> None:
    kind = "swa_" if local else ""
    hidden, head, kernel = text["hidden_size"], text[f"{kind}head_dim"], text["sconv_kernel_size"]
    heads, keys = text[f"{kind}num_attention_heads"], text[f"{kind}num_key_value_heads"] * head
    make.weight(at + "attn.wq_du.weight", heads * head, hidden)
    make.weight(at + "attn.wk_dv.weight", keys, hidden)
    make.weight(at + "attn.wv_dv.weight", keys, hidden)
    make.weight(at + "attn.wr_du.weight", heads * text["d_rel"], hidden)
    make.weight(at + "attn.wo_ud.weight", hidden, heads * head)
    make.weight(at + "attn.k_sconv.weight", keys, 1, kernel)
    make.weight(at + "attn.v_sconv.weight", keys, 1, kernel)
    extent = text["sliding_window_size"] if local else text["rel_extent"]
    make.weight(at + "attn.rel_logits_proj.proj", text["d_rel"], extent)
    make.norm(at + "attn.q_norm.weight", head)
    make.norm(at + "attn.k_norm.weight", head)
    for part in ("attn", "mlp"):
        make.norm(f"{at}{part}_norm.weight", hidden)
        make.weight(f"{at}{part}_sconv.weight", hidden, 1, kernel)


def _inkling_dense(make: Maker, text: Config, at: str) -> None:
    make.weight(at + "mlp.w13_dn.weight", 2 * text["dense_intermediate_size"], text["hidden_size"])
    make.weight(at + "mlp.w2_md.weight", text["hidden_size"], text["dense_intermediate_size"])
    make.norm(at + "mlp.global_scale", 1)


def _inkling_sparse(make: Maker, text: Config, at: str) -> None:
    hidden, width = text["hidden_size"], text["moe_intermediate_size"]
    experts, shared = text["n_routed_experts"], text["n_shared_experts"]
    make.weight(at + "mlp.gate.weight", experts + shared, hidden)
    make.precise(at + "mlp.gate.bias", experts)
    make.precise(at + "mlp.gate.global_scale", 1)
    make.weight(at + "mlp.experts.w13_weight", experts, 2 * width, hidden)
    make.weight(at + "mlp.experts.w2_weight", experts, hidden, width)
    make.weight(at + "mlp.shared_experts.shared_w13_weight", shared, 2 * width, hidden)
    make.weight(at + "mlp.shared_experts.shared_w2_weight", shared, hidden, width)


def _inkling_towers(make: Maker, hidden: int) -> None:
    make.weight("model.audio.encoder.weight", 80 * 16, hidden)
    make.norm("model.audio.final_norm.weight", hidden)
    for stage, (rows, columns) in enumerate(((128, 75), (320, 512), (4800, 5120), (hidden, 9600))):
        make.weight(f"model.visual.layers.linear_{stage}.weight", rows, columns)
        if stage < 3:
            make.norm(f"model.visual.layers.norm_{stage}.weight", rows)
    make.norm("model.visual.final_norm.weight", hidden)


# --- writing ----------------------------------------------------------------------------------------------------------

FAMILIES: dict[str, Callable[..., Config]] = {
    "llama": llama,
    "llama_tied": lambda make, **changes: llama(make, tied=True, **changes),
    "qwen3_moe": qwen3_moe,
    "glm_moe_dsa": glm_moe_dsa,
    "glm_moe_dsa_fp8": lambda make, **changes: glm_moe_dsa(make, fp8=True, **changes),
    "deepseek_v4_flash": deepseek_v4,
    "deepseek_v4_fp8": lambda make, **changes: deepseek_v4(make, form="fp8", **changes),
    "deepseek_v4_plain": lambda make, **changes: deepseek_v4(make, form="plain", **changes),
    "inkling": inkling,
}


def make_checkpoint(family: str, *, seed: int = 0, **changes: Any) -> tuple[Config, Tensors]:
    """Configuration and tensors of a family; ``changes`` are keys of its configuration."""
    make = Maker(seed)
    config = FAMILIES[family](make, **changes)
    return config, make.tensors


def write_files(folder: Path, config: Config, tensors: Tensors, num_shards: int = 3) -> Path:
    """``config.json`` and the tensors in so many files with an index (1: ``model.safetensors`` alone)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[number * len(names) // num_shards : (number + 1) * len(names) // num_shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_checkpoint(folder: Path, family: str, *, seed: int = 0, num_shards: int = 3, **changes: Any) -> Path:
    """A family's checkpoint in ``folder``, which it returns."""
    return write_files(folder, *make_checkpoint(family, seed=seed, **changes), num_shards)
