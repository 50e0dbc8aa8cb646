"""Qwen3-30B-A3B and Qwen3-4B: two models, two recipes, for clusters and for one device."""

from __future__ import annotations

from lockstep.config.cluster_schema import EngineLayoutConfig, TrainLayoutConfig
from lockstep.config.environment_schema import EnvironmentConfig
from lockstep.config.schema import (
    AlgorithmConfig,
    BoundConfig,
    CheckpointConfig,
    CorrectionConfig,
    EvalConfig,
    GateConfig,
    PathModel,
    PromptConfig,
    RefitConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from lockstep.recipes import derived, recipe
from lockstep.recipes.overlays import Changes, overlay, variant
from lockstep.recipes.parts import (
    AIME_PROBLEMS,
    ONE_CONNECTION,
    bf16_bound,
    dapo_math,
    gsm8k,
    megatron_trainer,
    model_folder,
    pruned_from,
)

MOE, DENSE = "qwen3-30b-a3b", "qwen3-4b"


@recipe(MOE, hardware="h200")
def qwen3_30b_a3b() -> RunConfig:
    """GSPO on competition mathematics, on half a node or a whole one."""
    return RunConfig(
        name=MOE,
        description="Qwen3-30B-A3B learns mathematics (GSPO with TIS, dapo-math-17k, AIME 2024 held out)",
        steps=3000,
        device="cuda",
        model=PathModel(path=model_folder("QWEN3_30B_A3B", "Qwen3-30B-A3B"), catalogue=MOE),
        prompt=PromptConfig(max_tokens=2048, overlong="skip"),
        task=dapo_math(),
        rollout=RolloutConfig(
            engine="sglang",
            process="separate",
            num_slots=256,
            prefill_tokens=8192,
            max_new_tokens=8192,
            layout=EngineLayoutConfig(memory_fraction=0.7),
        ),
        algorithm=AlgorithmConfig(
            num_prompts=8,
            group_size=8,
            optimizer_steps_per_batch=2,
            loss="gspo",
            aggregation="seq_mean_token_mean",
            clip_low=4e-4,
            clip_high=4e-4,
            corrections=CorrectionConfig(weight="tis"),
        ),
        trainer=megatron_trainer(
            layout=TrainLayoutConfig(etp=1),
            megatron={"optimizer_offload_fraction": 1.0, "precision_aware_optimizer": True},
        ),
        gate=GateConfig(bounds=(bf16_bound(), bf16_bound("fp8"))),
        refit=RefitConfig(transport="cuda_ipc", bucket_bytes=512 << 20),
        environment=EnvironmentConfig(strict=True),
        eval=EvalConfig(every=20, num_problems=AIME_PROBLEMS),
        checkpoint=CheckpointConfig(every=20),
    )


@derived(f"{MOE}-5layer", base=MOE, hardware="h200")
def moe_pruned() -> Changes:
    """Five layers, on one device: it can't produce meaningful text."""
    return {
        "description": ("Qwen3-30B-A3B's first five layers: a smoke test on one device", "it is another model"),
        "model.catalogue": (f"{MOE}-5layer", "its own sizes"),
        "model.path": (model_folder("QWEN3_30B_A3B_5LAYER", "Qwen3-30B-A3B-5layer"), "its own weights"),
        **pruned_from(model_folder("QWEN3_30B_A3B", "Qwen3-30B-A3B"), 5),
        "steps": (10, "a smoke test"),
        "eval.every": (0, "a smoke test"),
        "rollout.max_new_tokens": (100, "meaningless text need not be long"),
    }


@overlay(MOE, hardware="h200", evidence="qwen3-30b-a3b-h200-4")
def moe_h200() -> Changes:
    """Half a node: two stages, sequences over two devices."""
    return {
        "cluster.gpus_per_node": (4, "half an HGX H200"),
        "trainer.layout.pp": (2, "48 = 24 + 24"),
        "trainer.layout.cp": (2, "long answers over two devices"),
        "trainer.layout.ep": (2, "the devices of a stage"),
        "trainer.micro_batch_tokens": (8192, "141 GB a device"),
        **_one_engine(4),
        **ONE_CONNECTION,
    }


@overlay(MOE, hardware="mi350x", evidence="qwen3-30b-a3b-mi350x-4")
def moe_mi350x() -> Changes:
    """Half a node: the layout of H200 holds on AMD devices too."""
    return {
        **moe_h200(),
        "cluster.gpus_per_node": (4, "half a platform"),
        "trainer.micro_batch_tokens": (8192, "288 GB a device"),
    }


@overlay(MOE, hardware="h100", evidence="qwen3-30b-a3b-h100-8")
def moe_h100() -> Changes:
    """A node of 80 GB a device."""
    return {
        "cluster.gpus_per_node": (8, "an HGX H100 has eight"),
        "trainer.layout.tp": (4, "half a node"),
        "trainer.layout.sequence_parallel": (True, "a MoE with tensor parallelism needs it"),
        "trainer.layout.ep": (8, "all devices"),
        "trainer.micro_batch_tokens": (32768, "the budget of its launcher"),
        "algorithm.num_prompts": (32, "eight devices sample more"),
        **_one_engine(8),
        **ONE_CONNECTION,
    }


@overlay(MOE, hardware="mi355x", evidence="qwen3-30b-a3b-mi355x-4")
def moe_mi355x() -> Changes:
    """Half a node: ROCm's all-to-all between four expert ranks."""
    return {
        "cluster.gpus_per_node": (4, "half a platform"),
        "trainer.layout.tp": (2, "the engine's fp8 blocks of 128 allow no more"),
        "trainer.layout.sequence_parallel": (True, "a MoE with tensor parallelism needs it"),
        "trainer.layout.cp": (2, "long answers over two devices"),
        "trainer.layout.ep": (4, "all devices"),
        "trainer.micro_batch_tokens": (2048, "the budget that this layout was run with"),
        **_one_engine(4),
        "rollout.layout.ep": (4, "all devices: its all-to-all sets it so"),
        "rollout.layout.moe_a2a": ("mori", "ROCm's; deepep is its CUDA counterpart"),
        "rollout.quantisation": ("fp8", "as this layout was run"),
        "rollout.prefill_tokens": (4096, "mori dispatches at most so many tokens of a rank"),
        **ONE_CONNECTION,
    }


def _one_engine(devices: int) -> Changes:
    return {
        "rollout.layout.gpus_per_engine": (devices, "one engine has all devices"),
        "rollout.layout.tp": (devices, "one engine has all devices"),
    }


@variant(MOE, "plain-routing", group="routing")
def plain_routing() -> Changes:
    """The recipe as it stands: the trainer routes by itself."""
    return {}


@variant(MOE, "routing-replay", group="routing")
def routing_replay() -> Changes:
    """The trainer runs the experts that the engine chose (R3)."""
    return {
        "rollout.record_routes": (True, "the engine has to record them"),
        "trainer.routing_replay": (True, "a router tie broken differently moves single tokens far"),
    }


@recipe(DENSE)
def qwen3_4b() -> RunConfig:
    """GRPO on grade-school mathematics on one device, everything in one process."""
    return RunConfig(
        name=DENSE,
        description="Qwen3-4B learns grade-school mathematics on one GPU (GRPO, gsm8k)",
        steps=200,
        model=PathModel(path=model_folder("QWEN3_4B", "Qwen3-4B"), catalogue=DENSE),
        prompt=PromptConfig(max_tokens=512, thinking=False, overlong="skip"),
        task=gsm8k(),
        rollout=RolloutConfig(max_new_tokens=512, num_slots=128),
        algorithm=AlgorithmConfig(num_prompts=16, group_size=8),
        trainer=TrainerConfig(learning_rate=1e-6, micro_batch_tokens=8192, gradient_checkpointing=True),
        gate=GateConfig(
            bounds=(
                bf16_bound(),
                BoundConfig(
                    bound=0.07,
                    hardware="cpu",
                    dtype="bfloat16",
                    evidence="as the quickstart: bfloat16 on both sides, each at most 0.034 from a float32 forward; "
                    "not measured for this model",
                ),
            )
        ),
        environment=EnvironmentConfig(strict=True),
        eval=EvalConfig(every=20, num_problems=128),
        checkpoint=CheckpointConfig(every=20),
    )


@overlay(DENSE, hardware="mi300x", evidence="qwen3-4b-mi300x-8")
def dense_mi300x() -> Changes:
    """A node: slime's script for AMD devices, with its longer prompts and answers."""
    return {
        "cluster.gpus_per_node": (8, "an MI300X platform has eight"),
        "trainer.backend": ("megatron", "several ranks"),
        "trainer.gradient_checkpointing": (False, "Megatron recomputes by its own settings"),
        "trainer.weight_decay": (0.1, "as slime's script"),
        "trainer.beta2": (0.98, "as slime's script"),
        "trainer.micro_batch_tokens": (9216, "as slime's script"),
        "trainer.layout.tp": (2, "one engine's devices"),
        "trainer.layout.sequence_parallel": (True, "activations over both tensor parallel parts"),
        "trainer.megatron.implementation": ("miles", "slime's arguments"),
        "trainer.megatron.recompute": ("full", "as slime's script"),
        "trainer.megatron.recompute_method": ("uniform", "as slime's script"),
        "trainer.megatron.recompute_num_layers": (1, "as slime's script"),
        "rollout.engine": ("sglang", "several ranks"),
        "rollout.process": ("separate", "SGLang has its own"),
        "rollout.max_new_tokens": (8192, "as slime's script"),
        "rollout.layout.gpus_per_engine": (2, "as slime's script"),
        "rollout.layout.tp": (2, "an engine's devices"),
        "rollout.layout.memory_fraction": (0.7, "as slime's script"),
        "refit.transport": ("cuda_ipc", "engine and trainer share devices"),
        "algorithm.num_prompts": (32, "as slime's script"),
        "prompt.max_tokens": (2048, "room for longer problems"),
        **ONE_CONNECTION,
    }
