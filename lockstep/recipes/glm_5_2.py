"""GLM-5.2: GRPO on competition mathematics with truncated importance sampling.

A stage may not start on a layer that takes its sparse positions from an earlier one, which decides the pipeline split.
The clip range that public runs pass (0.2, 0.28) is left out: with one optimizer step a batch it has no effect.
"""

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
    AIME_PROBLEMS,
    ONE_CONNECTION,
    bf16_bound,
    dapo_math,
    megatron_trainer,
    model_folder,
    pruned_from,
)

NAME = "glm-5_2"


@recipe(NAME, hardware="gb300")
def glm_5_2() -> RunConfig:
    """What is the same on every device."""
    return RunConfig(
        name=NAME,
        description="GLM-5.2 learns mathematics (GRPO with TIS, dapo-math-17k, AIME 2024 held out)",
        steps=3000,
        device="cuda",
        model=PathModel(path=model_folder("GLM_5_2", "GLM-5.2"), catalogue=NAME),
        prompt=PromptConfig(max_tokens=2048, overlong="skip"),
        task=dapo_math(),
        rollout=RolloutConfig(
            engine="sglang",
            process="separate",
            num_slots=512,
            prefill_tokens=8192,
            max_new_tokens=32768,
            layout=EngineLayoutConfig(gpus_per_engine=4, tp=4, ep=4, memory_fraction=0.85, kv_cache_dtype="fp8"),
            sglang=SglangConfig(
                engine_args={
                    "attention_backend": "dsa",
                    "page_size": 64,
                    "cuda_graph_max_bs_decode": 32,
                    "watchdog_timeout": 3600,
                }
            ),
        ),
        algorithm=AlgorithmConfig(
            num_prompts=8,
            group_size=8,
            corrections=CorrectionConfig(weight="tis", weight_low=0.5, weight_high=2.0),
        ),
        trainer=megatron_trainer(
            micro_batch_tokens=8192,
            logprob_chunk_tokens=16384,
            layout=TrainLayoutConfig(etp=1, sequence_parallel=True, moe_dispatcher="alltoall"),
            megatron={"pad_multiple": 1024, "rematerialise_weights": True},
        ),
        gate=GateConfig(bounds=(bf16_bound(), bf16_bound("fp8"))),
        refit=RefitConfig(transport="cuda_ipc", bucket_bytes=2 << 30),
        environment=EnvironmentConfig(strict=True),
        eval=EvalConfig(every=20, num_problems=AIME_PROBLEMS),
        checkpoint=CheckpointConfig(every=20),
    )


@derived(f"{NAME}-5layer", base=NAME, hardware="mi355x")
def pruned() -> Changes:
    """Three dense layers and two with experts, on four devices: it can't produce meaningful text."""
    return {
        "description": ("GLM-5.2's first five layers: a smoke test on four devices", "it is another model"),
        "model.catalogue": (f"{NAME}-5layer", "its own sizes"),
        "model.path": (model_folder("GLM_5_2_5LAYER", "GLM-5.2-5layer"), "its own weights"),
        **pruned_from(model_folder("GLM_5_2", "GLM-5.2"), 5),
        "steps": (10, "a smoke test"),
        "eval.every": (0, "a smoke test"),
        "rollout.max_new_tokens": (100, "meaningless text need not be long"),
        "trainer.micro_batch_tokens": (2048, "sequences are short"),
        "trainer.megatron.optimizer_offload_fraction": (1.0, "as its smoke test ran"),
        "trainer.megatron.precision_aware_optimizer": (True, "Megatron offloads states of this optimizer alone"),
        "rollout.layout.memory_fraction": (0.7, "0.85 makes nearly all of the card cache: no room to check weights"),
    }


@overlay(NAME, hardware="gb300", evidence="glm-5_2-gb300-64")
def gb300() -> Changes:
    """Sixteen trays of four."""
    return {
        "cluster.nodes": (16, "744 B parameters with their optimizer states"),
        "cluster.gpus_per_node": (4, "a compute tray has four"),
        "trainer.layout.tp": (8, "two trays, joined by NVLink"),
        "trainer.layout.pp": (4, "stages start at layers 0, 18, 38 and 58, which have indexers"),
        "trainer.layout.ep": (16, "four trays"),
        "trainer.layout.first_stage_layers": (18, "78 = 18 + 20 + 20 + 20: no stage starts on an index-share layer"),
        "trainer.layout.last_stage_layers": (20, "78 = 18 + 20 + 20 + 20: no stage starts on an index-share layer"),
        "rollout.quantisation": ("fp8", "four devices hold 744 B parameters in eight bits, not in sixteen"),
        **_cuda_kernels(),
    }


@overlay(f"{NAME}-5layer", hardware="mi355x", evidence="glm-5_2-5layer-mi355x-4")
def pruned_mi355x() -> Changes:
    """Half a node."""
    return {
        **_four_devices(),
        "rollout.sglang.engine_args.dsa_prefill_backend": ("tilelang", "ROCm has this kernel alone"),
        "rollout.sglang.engine_args.dsa_decode_backend": ("tilelang", "ROCm has this kernel alone"),
    }


@overlay(f"{NAME}-5layer", hardware="h200", evidence="glm-5_2-5layer-h200-4")
def pruned_h200() -> Changes:
    """Half a node."""
    return {**_four_devices(), **_cuda_kernels()}


def _four_devices() -> Changes:
    return {
        "cluster.gpus_per_node": (4, "what the pruned model needs"),
        "trainer.layout.tp": (4, "all devices"),
        "trainer.layout.ep": (4, "all devices"),
        **ONE_CONNECTION,
    }


def _cuda_kernels() -> Changes:
    return {
        "rollout.sglang.engine_args.dsa_prefill_backend": ("flashmla_sparse", "CUDA's kernel"),
        "rollout.sglang.engine_args.dsa_decode_backend": ("flashmla_kv", "CUDA's kernel"),
    }
