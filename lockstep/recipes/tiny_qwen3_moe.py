"""A random tiny Qwen3-MoE that learns one-digit addition in seconds: the smoke test of the whole loop on a MoE."""

from __future__ import annotations

from collections.abc import Iterator

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


def quantised_bounds() -> Iterator[BoundConfig]:
    """Bounds for ``rollout.quantisation``, from a run of 240 steps with each scheme: of half of the tokens, which a
    fault of the weights moves, and of the mean, which single tokens whose experts differ move by up to five nats."""
    seen = {
        "fp8": (0.003, "9.6e-4", "0.005", "0.063"),
        "fp8_ue8m0": (0.003, "1.5e-3", "0.005", "0.076"),
        "mxfp4_experts": (0.015, "5.0e-3", "0.009", "0.065"),
    }
    for scheme, (bound, half, median, largest) in seen.items():
        common = {"hardware": "cpu", "dtype": "float32", "quantisation": scheme}
        evidence = f"step means of 240 steps at a constant rate were {median} at the median and {largest} at most"
        yield BoundConfig.model_validate({"metric": "abs_diff/mean", "bound": 0.1, "evidence": evidence, **common})
        evidence = f"half of the tokens were within {half} at every one of 240 steps at a constant rate"
        shown = {"bound": bound, "evidence": evidence, "shown": True}
        yield BoundConfig.model_validate({"metric": "abs_diff/p50", **shown, **common})


@recipe("tiny-qwen3-moe")
def tiny_qwen3_moe() -> RunConfig:
    """Supervised warm-up of a few seconds, then GRPO, in float32."""
    return RunConfig(
        name="tiny-qwen3-moe",
        description="Random 2-layer Qwen3-MoE on characters: supervised warm-up, then GRPO on one-digit addition",
        steps=240,
        threads=1,  # so small that a second thread only waits
        model=RandomModel(
            model_type="qwen3_moe",
            config={
                "hidden_size": 64,
                "intermediate_size": 128,
                "moe_intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,  # the least that kernels of vLLM take
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "max_position_embeddings": 128,
                "tie_word_embeddings": True,
            },
        ),
        prompt=PromptConfig(format="raw"),
        task=ArithmeticTask(min_operand=0, max_operand=9, num_heldout=20, template="{a}{op}{b}=", stop_bonus=0.0),
        rollout=RolloutConfig(max_new_tokens=4, num_slots=128, dtype="float32"),
        algorithm=AlgorithmConfig(num_prompts=16, group_size=8),
        supervised=SupervisedConfig(steps=60, batch_size=64, learning_rate=3e-3),
        # The rate falls to a tenth: at a constant one the reward of the last steps swings by a quarter.
        trainer=TrainerConfig(learning_rate=1e-3, schedule="cosine", dtype="float32", micro_batch_tokens=8192),
        gate=GateConfig(
            bounds=(
                BoundConfig(
                    metric="abs_diff/mean",
                    bound=1e-4,
                    hardware="cpu",
                    dtype="float32",
                    evidence="rounding of float32 is 1.8e-7 to 6.4e-7; above that is room for a router tie that the "
                    "two sides break differently, which moves single tokens by hundredths",
                    shown=True,
                ),
                BoundConfig(
                    metric="abs_diff/p50",
                    bound=1e-6,
                    hardware="cpu",
                    dtype="float32",
                    evidence="half of the tokens of a healthy run are within 4.8e-7 at every step; no tie moves half",
                    shown=True,
                ),
                BoundConfig(bound=1e-4, hardware="cuda", dtype="float32", evidence=FLOAT32_ON_CUDA),
                *quantised_bounds(),
            )
        ),
        environment=EnvironmentConfig(strict=True),
        eval=EvalConfig(num_problems=20),
        checkpoint=CheckpointConfig(every=120, keep=1),
    )
