"""The DeepSeek-V4 architecture, tiny and random: hash layers, compressors, indexer and hyper-connections all run.

It shows that loop, engine and trainer agree on this architecture while its weights change; it is not tuned to learn.
"""

from __future__ import annotations

from typing import Any

from lockstep.config.environment_schema import EnvironmentConfig
from lockstep.config.schema import (
    AlgorithmConfig,
    ArithmeticTask,
    BoundConfig,
    CheckpointConfig,
    EvalConfig,
    GateConfig,
    PromptConfig,
    RandomModel,
    RolloutConfig,
    RunConfig,
    SupervisedConfig,
    TrainerConfig,
)
from lockstep.recipes import recipe
from lockstep.recipes.evidence import FLOAT32_ON_CUDA

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    # With few index heads ReLU ties make the indexer's top-k depend on tensor shapes.
    "index_n_heads": 64,
    "index_head_dim": 16,
    "index_topk": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "hc_mult": 2,
    "sliding_window": 16,
    "layer_types": [
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
}
"""Of transformers' DeepseekV4Config; the rest are its defaults."""


@recipe("tiny-deepseek-v4")
def tiny_deepseek_v4() -> RunConfig:
    """Four layers with both kinds of compressed attention, in float32; agreement is judged at 1e-5."""
    return RunConfig(
        name="tiny-deepseek-v4",
        description="Random tiny DeepSeek-V4: the whole loop on the real architecture, agreement to 1e-5",
        steps=4,
        threads=1,  # so small that a second thread only waits
        model=RandomModel(
            model_type="deepseek_v4",
            config=SIZES,
        ),
        prompt=PromptConfig(format="raw"),
        # Prompts are long enough for both compressors to have whole windows.
        task=ArithmeticTask(
            min_operand=0, max_operand=4, num_heldout=5, template="Please add {a} and {b}. The sum of both is: "
        ),
        rollout=RolloutConfig(max_new_tokens=4, num_slots=32, dtype="float32"),
        algorithm=AlgorithmConfig(num_prompts=4, group_size=8),
        # Enough for some samples to be right and some wrong: without a difference there is no gradient to agree on.
        supervised=SupervisedConfig(steps=30, batch_size=32, learning_rate=3e-3),
        trainer=TrainerConfig(learning_rate=1e-3, dtype="float32"),
        gate=GateConfig(
            bounds=(
                BoundConfig(
                    bound=1e-5,
                    hardware="cpu",
                    dtype="float32",
                    evidence="rounding of float32 only, which is 1e-7 to 3e-7 in healthy runs",
                    shown=True,
                ),
                BoundConfig(bound=1e-5, hardware="cuda", dtype="float32", evidence=FLOAT32_ON_CUDA),
            )
        ),
        environment=EnvironmentConfig(strict=True),
        eval=EvalConfig(num_problems=5),
        checkpoint=CheckpointConfig(every=4, keep=1),
    )
