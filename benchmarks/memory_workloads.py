"""What benchmarks/memory_gpu.py runs: models by their sizes, and work that fills what the planner assumes.

``FITTED`` configurations were looked at while the formulas were written, ``HELD_OUT`` ones were not and are judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Configuration:
    """A model by ``model_type`` and fields of its configuration, and the work it does. ``prompt`` and ``response``
    tokens are such that four samples of a prompt are a row of ``prompt + 4 · (response − 1)`` positions, and whole rows
    fill ``micro_batch`` positions."""

    model_type: str
    fields: dict[str, Any]
    micro_batch: int = 4096
    prompt: int = 36
    response: int = 248
    num_prompts: int = 16
    group_size: int = 4
    dtype: str = "bfloat16"
    checkpointing: bool = False
    save: bool = True
    chunk: int = 512


_QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 2048}

FITTED: dict[str, Configuration] = {
    "fit-qwen3": Configuration(
        "qwen3",
        _QWEN3
        | {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 10, "num_attention_heads": 12}
        | {"num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 65_536},
    ),
    "tiny": Configuration(
        "qwen3",
        {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 6}
        | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": True},
        micro_batch=512,
        prompt=20,
        response=28,
        num_prompts=8,
        chunk=128,
    ),
    "tiny-moe": Configuration(
        "qwen3_moe",
        {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6}
        | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2},
        micro_batch=512,
        prompt=20,
        response=28,
        num_prompts=8,
        chunk=128,
    ),
}

FITTED["mid"] = Configuration(
    "qwen3",
    {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192, "tie_word_embeddings": False},
    micro_batch=1024,
    prompt=36,
    response=56,
    num_prompts=8,
)
FITTED["mid-tied"] = replace(FITTED["mid"], fields=FITTED["mid"].fields | {"tie_word_embeddings": True})
FITTED["mid-one-batch"] = replace(FITTED["mid"], micro_batch=4096)
FITTED["mid-checkpointing"] = replace(FITTED["mid"], checkpointing=True)
FITTED["mid-moe"] = Configuration(
    "qwen3_moe",
    {"hidden_size": 256, "moe_intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}
    | {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192, "num_experts": 16, "num_experts_per_tok": 8},
    micro_batch=1024,
    prompt=36,
    response=56,
    num_prompts=8,
)

HELD_OUT: dict[str, Configuration] = {
    "qwen3-0_6b": Configuration(
        "qwen3",
        _QWEN3
        | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "tie_word_embeddings": True},
    ),
    "qwen3-30b-a3b-4layer": Configuration(
        "qwen3_moe",
        _QWEN3
        | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 4}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
        | {"norm_topk_prob": True},
        save=False,
    ),
    "smollm2-135m": Configuration(
        "llama",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        | {"num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True}
        | {"max_position_embeddings": 2048},
        micro_batch=8192,
        num_prompts=32,
    ),
}
