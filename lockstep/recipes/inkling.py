"""Inkling and Inkling-Small: GRPO on competition mathematics with truncated importance sampling and routing replay."""

from __future__ import annotations

from lockstep.config.cluster_schema import EngineLayoutConfig, SglangConfig, TrainLayoutConfig
from lockstep.config.environment_schema import EnvironmentConfig
from lockstep.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    CorrectionConfig,
    EvalConfig,
    GateConfig,
    PathModel,
    PromptConfig,
    RefitConfig,
    RolloutConfig,
    RunConfig,
)
from lockstep.recipes import derived, recipe
from lockstep.recipes.overlays import Changes, overlay
from lockstep.recipes.parts import (
    AIME_2025,
    AIME_PROBLEMS,
    NO_NVLS,
    ONE_CONNECTION,
    bf16_bound,
    dapo_math,
    megatron_trainer,
    model_folder,
    pruned_from,
)

NAME, SMALL = "inkling", "inkling-small"


@recipe(NAME, hardware="gb300")
def inkling() -> RunConfig:
    """What is the same on every device, and for both sizes."""
    return RunConfig(
        name=NAME,
        description="Inkling learns mathematics (GRPO with TIS, dapo-math-17k, AIME 2025 held out)",
        steps=3000,
        device="cuda",
        model=PathModel(path=model_folder("INKLING", "Inkling"), catalogue=NAME),
        prompt=PromptConfig(max_tokens=2048, overlong="skip"),
        task=dapo_math(AIME_2025),
        rollout=RolloutConfig(
            engine="sglang",
            process="separate",
            num_slots=64,
            prefill_tokens=8192,
            max_new_tokens=4096,
            record_routes=True,
            layout=EngineLayoutConfig(memory_fraction=0.6, max_total_tokens=327680),
            sglang=SglangConfig(
                engine_args={
                    "moe_runner_backend": "triton",
                    "mamba_radix_cache_strategy": "extra_buffer",
                    "enable_multimodal": True,
                    "context_length": 8192,
                    "disable_custom_all_reduce": True,
                }
            ),
        ),
        algorithm=AlgorithmConfig(
            num_prompts=32,
            group_size=8,
            optimizer_steps_per_batch=4,
            clip_high=0.28,
            dual_clip=3.0,
            corrections=CorrectionConfig(weight="tis"),
        ),
        trainer=megatron_trainer(
            routing_replay=True,
            micro_batch_tokens=8192,
            layout=TrainLayoutConfig(tp=4, etp=1, sequence_parallel=True),
            megatron={"micro_batch": 1, "offload_target": "disk"},
        ),
        gate=GateConfig(bounds=(bf16_bound(),)),
        refit=RefitConfig(transport="cuda_ipc", bucket_bytes=1 << 30),
        environment=EnvironmentConfig(strict=True, engine={"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}),
        eval=EvalConfig(every=5, num_problems=AIME_PROBLEMS),
        checkpoint=CheckpointConfig(every=10),
    )


@derived(SMALL, base=NAME, hardware="h200")
def small() -> Changes:
    """The smaller model: everything but its sizes and where it runs is Inkling's."""
    return {
        "description": (
            "Inkling-Small learns mathematics (GRPO with TIS, dapo-math-17k, AIME 2025 held out)",
            "its own",
        ),
        "model.catalogue": (SMALL, "its own sizes"),
        "model.path": (model_folder("INKLING_SMALL", "Inkling-Small"), "its own weights"),
    }


@derived(f"{SMALL}-4layer", base=SMALL, hardware="mi355x")
def small_pruned() -> Changes:
    """Two dense layers and two with experts, on four devices: it can't produce meaningful text."""
    return {
        "description": ("Inkling-Small's first four layers: a smoke test on four devices", "it is another model"),
        "model.catalogue": (f"{SMALL}-4layer", "its own sizes"),
        "model.path": (model_folder("INKLING_SMALL_4LAYER", "Inkling-Small-4layer"), "its own weights"),
        **pruned_from(model_folder("INKLING_SMALL", "Inkling-Small"), 4),
        "steps": (10, "a smoke test"),
        "eval.every": (0, "a smoke test"),
        "rollout.max_new_tokens": (100, "meaningless text need not be long"),
    }


@overlay(NAME, hardware="gb300", evidence="inkling-gb300-64")
def gb300() -> Changes:
    """Sixteen trays of four."""
    return {
        **_trays(16),
        "trainer.layout.pp": (4, "four stages of four trays"),
        "trainer.layout.last_stage_layers": (15, "66 = 17 + 17 + 17 + 15; it has the head too"),
        **_offload(0.25, "by the plan the states leave no margin; the public profile does not say how they fit"),
    }


@overlay(NAME, hardware="gb300", nodes=12, evidence="inkling-gb300-48")
def gb300_12() -> Changes:
    """Twelve trays: one stage fewer."""
    return {
        **_trays(12),
        "trainer.layout.pp": (3, "66 = 22 + 22 + 22"),
        **_offload(0.6, "by the plan the states don't fit; the public profile does not say how they do"),
    }


@overlay(SMALL, hardware="h200", evidence="inkling-small-h200-32")
def small_h200() -> Changes:
    """Four nodes."""
    return {
        "cluster.nodes": (4, "the optimizer's states fit four nodes"),
        "cluster.gpus_per_node": (8, "an HGX H200 has eight"),
        "trainer.layout.pp": (8, "two stages a node"),
        "trainer.layout.ep": (4, "as many as tensor parallel parts"),
        "trainer.layout.last_stage_layers": (7, "42 = 7 × 5 + 7; it has the head too"),
        "rollout.layout.gpus_per_engine": (8, "a node: 532 GB of weights"),
        "rollout.layout.tp": (8, "all devices of an engine"),
        "rollout.max_new_tokens": (2048, "the length that this layout was run with"),
        **_offload(0.75, "by the plan the states don't fit; the public profile does not say how they do"),
        **ONE_CONNECTION,
        **_cuda_kernels(),
    }


@overlay(f"{SMALL}-4layer", hardware="mi355x", evidence="inkling-small-4layer-mi355x-4")
def small_pruned_mi355x() -> Changes:
    """Half a node."""
    return {
        **_four_devices(),
        "rollout.sglang.engine_args.attention_backend": ("triton", "ROCm has no fa4"),
    }


@overlay(f"{SMALL}-4layer", hardware="h200", evidence="inkling-small-4layer-h200-4")
def small_pruned_h200() -> Changes:
    """Half a node."""
    return {**_four_devices(), **_cuda_kernels()}


def _four_devices() -> Changes:
    return {
        "cluster.gpus_per_node": (4, "what the pruned model needs"),
        "trainer.layout.ep": (4, "all devices"),
        "rollout.layout.gpus_per_engine": (4, "all devices"),
        "rollout.layout.tp": (4, "all devices"),
        **ONE_CONNECTION,
    }


def _trays(nodes: int) -> Changes:
    """What both layouts on GB300 have."""
    return {
        "cluster.nodes": (nodes, "947 B parameters"),
        "cluster.gpus_per_node": (4, "a compute tray has four"),
        "trainer.layout.ep": (16, "four trays"),
        "rollout.layout.gpus_per_engine": (16, "four trays: 1.9 TB of weights"),
        "rollout.layout.tp": (16, "all devices of an engine"),
        **_cuda_kernels(),
    }


def _cuda_kernels() -> Changes:
    return {
        "rollout.sglang.engine_args.attention_backend": ("fa4", "CUDA's kernel for its relative positions"),
        **NO_NVLS,
    }


def _offload(fraction: float, why: str) -> Changes:
    return {
        "trainer.megatron.optimizer_offload_fraction": (fraction, why),
        "trainer.megatron.precision_aware_optimizer": (True, "Megatron offloads states of this optimizer alone"),
    }
