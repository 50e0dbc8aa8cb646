"""Tiny random float32 models, one per architecture, small enough for a forward in milliseconds.

Index heads are many (64) because few of them tie at zero after the ReLU, and a tie makes the top-k depend on shape.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.config.schema import RandomModel
from lockstep.model.load import load_model

_BASE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_DSA: dict[str, Any] = {**_MLA, "index_n_heads": 64, "index_head_dim": 32, "index_topk": 8}
_QWEN_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "tie_word_embeddings": True},
    "mistral": {**_BASE, "sliding_window": None},
    "qwen2": dict(_BASE),
    "qwen3": {**_BASE, "head_dim": 16},
    "qwen3_moe": {**_BASE, **_QWEN_MOE},
    "glm4_moe": {
        **_BASE,
        "head_dim": 16,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {**_BASE, **_MLA},
    "deepseek_v32": {**_BASE, **_DSA},
    "glm_moe_dsa": {**_BASE, **_DSA},
    "gpt_oss": {
        **_BASE,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "inkling_text": {
        **_BASE,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "local_layer_ids": [0],
    },
    "deepseek_v4": {
        **_BASE,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "qk_rope_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "index_n_heads": 64,
        "index_head_dim": 32,
        "index_topk": 4,
        "sliding_window": 16,
        "hc_mult": 2,
        "num_hash_layers": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
}


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random model of ``model_type``."""
    fields = {**CONFIGS[model_type], **overrides}
    return load_model(RandomModel(model_type=model_type, config=fields, seed=seed), dtype)
