"""Tiny random models, one per architecture that the project names: ``tiny-qwen3-moe``, ``tiny-deepseek-v3``, …

Sizes are multiples of 32 and DeepSeek's latent heads have their real sizes, so that every engine's kernels take them.
"""

from __future__ import annotations

from typing import Any

from lockstep.config.schema import RandomModel

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    # Large enough that the output depends visibly on every layer, small enough not to amplify rounding.
    "initializer_range": 0.08,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    **_BASE,
    **_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
# With few index heads ReLU ties make the indexer's top-k depend on tensor shapes.
_INDEXER: dict[str, Any] = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 8}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "tie_word_embeddings": True},
    "qwen3": _BASE,
    "qwen3_moe": {**_BASE, **_EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "glm4_moe": {**_BASE, **_ROUTED, "use_qk_norm": True},
    "gpt_oss": {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "deepseek_v3": {name: value for name, value in _LATENT.items() if name != "head_dim"},
    "deepseek_v32": {**{name: value for name, value in _LATENT.items() if name != "head_dim"}, **_INDEXER},
    "glm_moe_dsa": {**{name: value for name, value in _LATENT.items() if name != "head_dim"}, **_INDEXER},
    "deepseek_v4": {
        **_BASE,
        **_EXPERTS,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_hash_layers": 1,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "qk_rope_head_dim": 16,
        "hc_mult": 2,
        "index_n_heads": 64,
        "index_head_dim": 32,
        "index_topk": 8,
        "sliding_window": 16,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    },
    "inkling_text": {
        **_BASE,
        **_EXPERTS,
        "n_routed_experts": 8,
        "swa_head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "sliding_window_size": 16,
        "rel_extent": 32,
        "logits_mup_width_multiplier": 1.0,
    },
}


def tiny_names() -> tuple[str, ...]:
    """``tiny-…`` for every architecture here."""
    return tuple(f"tiny-{model_type.replace('_', '-')}" for model_type in _CONFIGS)


def tiny_source(name: str, seed: int = 0) -> RandomModel | None:
    """The model that a ``tiny-…`` name means; None for any other name."""
    for known, (model_type, config) in zip(tiny_names(), _CONFIGS.items(), strict=True):
        if name == known:
            return RandomModel(model_type=model_type, config=dict(config), seed=seed)
    return None
