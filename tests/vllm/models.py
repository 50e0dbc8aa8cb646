"""Tiny float32 models that vLLM's CPU build runs, and both sides of a refit over them.

Sizes are multiples of 32 and heads have at least 32 dimensions, which the CPU kernels ask for; the latent attention of
DeepSeek-V3 has the sizes of the published models, which are the only ones there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from lockstep.config.schema import RandomModel, TrainerConfig
from lockstep.model.load import load_model
from lockstep.rollout.vllm_engine import VllmEngine
from lockstep.rollout.vllm_folder import write_model_folder
from lockstep.rollout.vllm_start import VllmSettings
from lockstep.train.fsdp import FsdpTrainer
from tests.contract.engine_contract import make_request, run

request = make_request

_DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    # Large enough that the output depends visibly on every layer, small enough not to amplify rounding.
    "initializer_range": 0.08,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**_DENSE, "tie_word_embeddings": False},
    "llama": {**_DENSE, "tie_word_embeddings": True},
    "qwen3_moe": {
        **_DENSE,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        **_DENSE,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.08,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
FAMILIES = ("qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")
"""The families whose agreement is tested; all of ``CONFIGS`` run."""


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model with the character tokenizer's vocabulary. Its router biases are not zero, as they are after
    training."""
    model = load_model(RandomModel(model_type=family, config={**CONFIGS[family], **overrides}, seed=seed), dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.1)
    return model


def tiny_trainer(family: str, seed: int = 0, temperature: float = 1.0, **overrides: Any) -> FsdpTrainer:
    """The trainer of a tiny model."""
    config = TrainerConfig(dtype="float32", learning_rate=1e-3)
    model = tiny_model(family, seed, **overrides)
    return FsdpTrainer(model, config, total_optimizer_steps=100, temperature=temperature)


def start_engine(
    model: Any, *, weights: bool = False, decode: Any = None, derived: Any = None, **more: Any
) -> VllmEngine:
    """An engine for ``model``: with random weights, or with the model's own, loaded from disk."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(model, Path(folder), weights=weights)
        options = {
            "dtype": "float32",
            "num_slots": 8,
            "kv_cache_bytes": 64 << 20,
            "load_format": "safetensors" if weights else "dummy",
            **more,
        }
        return VllmEngine(VllmSettings(folder, **options), decode=decode, derived=derived)


def greedy_tokens(engine: Any, num_prompts: int = 8, length: int = 32) -> list[list[int]]:
    """Greedy answers [num_prompts, length] to different prompts: 256 tokens by default."""
    prompts = [[5 + i, 6 + 2 * i, 7 + 3 * i] for i in range(num_prompts)]
    asked = [make_request(f"g{i}", one, temperature=0.0, max_new_tokens=length) for i, one in enumerate(prompts)]
    return [completion.tokens.tolist() for completion in run(engine, asked)]


def registry() -> Any:
    """The derived state that a run refreshes."""
    from lockstep.driver.engines import derived_state

    return derived_state()
