"""Tiny float32 models for the engine's contract tests: every architecture that the project names, at its own quirks."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.config.schema import RandomModel
from lockstep.model.load import load_model

_DENSE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Large enough that the output depends visibly on every layer, small enough not to amplify rounding.
    "initializer_range": 0.08,
}
_LATENT: dict[str, Any] = {
    **_DENSE,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
# Many index heads: with few, ReLU ties make the indexer's choice depend on the shape of the batch.
_INDEXER: dict[str, Any] = {"index_n_heads": 64, "index_head_dim": 32, "index_topk": 8}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_DENSE, "tie_word_embeddings": True},
    "qwen3": {**_DENSE},
    "qwen3_moe": {**_DENSE, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v3": {**_LATENT},
    "glm_moe_dsa": {**_LATENT, **_INDEXER},
    "deepseek_v4": {
        **_DENSE,
        **_INDEXER,
        "index_topk": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "sliding_window": 8,
        # Both compressions close several windows within a test's 30 tokens.
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "inkling_text": {
        **_DENSE,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "swa_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "sliding_window_size": 8,
        "rel_extent": 32,
        "logits_mup_width_multiplier": 1.0,
    },
}
FAST = ("llama", "qwen3", "qwen3_moe")
WITH_EXPERTS = tuple(name for name in ARCHITECTURES if name not in ("llama", "qwen3"))


def tiny_model(architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model of ``architecture`` with the character tokenizer's vocabulary of 99."""
    config = {**ARCHITECTURES[architecture], **overrides}
    return load_model(RandomModel(model_type=architecture, config=config, seed=seed), dtype)
