"""DeepSeek-V4-Flash: GRPO on competition mathematics, trained in bf16 or fp8, served in fp8.

The clip range that public runs pass (0.2, 0.28) is left out: with one optimizer step a batch the ratio is 1 where it is
clipped, so it would have no effect.
"""

from __future__ import annotations

from lockstep.config.cluster_schema import EngineLayoutConfig, TrainLayoutConfig
from lockstep.config.environment_schema import EnvironmentConfig
from lockstep.config.schema import (
    AlgorithmConfig,
    BoundConfig,
    CheckpointConfig,
    DynamicSamplingConfig,
    EvalConfig,
    GateConfig,
    PathModel,
    PromptConfig,
    RefitConfig,
    RolloutConfig,
    RunConfig,
)
from lockstep.recipes import derived, recipe
from lockstep.recipes.evidence import DEEPSEEK_V4_PROB_DIFF, DEEPSEEK_V4_ROLLOUT_MEAN
from lockstep.recipes.overlays import Changes, overlay, variant
from lockstep.recipes.parts import (
    AIME_PROBLEMS,
    DETERMINISTIC,
    NO_NVLS,
    ONE_CONNECTION,
    dapo_math,
    megatron_trainer,
    model_folder,
    pruned_from,
)

NAME = "deepseek-v4-flash"

BOUNDS = (
    BoundConfig(
        metric="abs_diff/rollout_mean",
        bound=0.09,
        hardware="cuda",
        dtype="bfloat16",
        quantisation="fp8",
        evidence=DEEPSEEK_V4_ROLLOUT_MEAN,
    ),
    BoundConfig(
        metric="prob_diff/mean",
        bound=0.02,
        hardware="cuda",
        dtype="bfloat16",
        quantisation="mxfp4_experts",
        evidence=DEEPSEEK_V4_PROB_DIFF,
    ),
)
"""Published agreement, by what the engine's weights are quantised to. None was shown with the layouts below."""


@recipe(NAME, hardware="mi355x")
def deepseek_v4_flash() -> RunConfig:
    """What is the same on every device."""
    return RunConfig(
        name=NAME,
        description="DeepSeek-V4-Flash learns mathematics (GRPO, dapo-math-17k, AIME 2024 held out)",
        steps=3000,
        device="cuda",
        model=PathModel(path=model_folder("DEEPSEEK_V4_FLASH", "DeepSeek-V4-Flash"), catalogue=NAME),
        prompt=PromptConfig(thinking=True, max_tokens=2048, overlong="skip"),
        task=dapo_math(),
        rollout=RolloutConfig(
            engine="sglang",
            process="separate",
            num_slots=64,  # SGLang's compressor states take 10.5 MB a request: its default of 2048 would be 21 GB
            prefill_tokens=16384,
            max_new_tokens=4096,
            temperature=0.8,
            quantisation="fp8",
            record_routes=True,
            layout=EngineLayoutConfig(gpus_per_engine=4, tp=4, ep=4, memory_fraction=0.7),
        ),
        algorithm=AlgorithmConfig(
            num_prompts=32, group_size=8, dynamic_sampling=DynamicSamplingConfig(enabled=True, max_refill_rounds=16)
        ),
        trainer=megatron_trainer(
            routing_replay=True,
            micro_batch_tokens=2048,
            packing="padded",  # its compressors cut windows by position: sequences may not share a row
            layout=TrainLayoutConfig(etp=1, sequence_parallel=True),
            megatron={
                "micro_batch": 1,
                "freeze_router": True,
                "optimizer_offload_fraction": 1.0,
                "precision_aware_optimizer": True,
            },
        ),
        gate=GateConfig(bounds=BOUNDS),
        refit=RefitConfig(transport="cuda_ipc", bucket_bytes=1 << 30),
        environment=EnvironmentConfig(strict=True),
        eval=EvalConfig(every=20, num_problems=AIME_PROBLEMS),
        checkpoint=CheckpointConfig(every=20),
    )


@derived(f"{NAME}-4layer", base=NAME, hardware="mi355x")
def pruned() -> Changes:
    """The first four layers, on one node: a smoke test that can't produce meaningful text."""
    return {
        "description": ("DeepSeek-V4-Flash's first four layers: a smoke test on one node", "it is another model"),
        "model.catalogue": (f"{NAME}-4layer", "its own sizes"),
        "model.path": (model_folder("DEEPSEEK_V4_FLASH_4LAYER", "DeepSeek-V4-Flash-4layer"), "its own weights"),
        **pruned_from(model_folder("DEEPSEEK_V4_FLASH", "DeepSeek-V4-Flash"), 4),
        "steps": (10, "a smoke test"),
        "eval.every": (0, "a smoke test"),
        "rollout.max_new_tokens": (1024, "meaningless text need not be long; with the prompt a multiple of fp8's 1024"),
    }


# --- hardware ---------------------------------------------------------------------------------------------------------


@overlay(NAME, hardware="mi355x", evidence="deepseek-v4-flash-mi355x-32")
def mi355x() -> Changes:
    """Four nodes: no second rank shares an expert's optimizer states, so most of them go to host memory."""
    return {
        "cluster.nodes": (4, "288 GB a device hold a quarter of the model's pipeline"),
        "cluster.gpus_per_node": (8, "an MI355X platform has eight"),
        "trainer.layout.tp": (4, "one engine's devices"),
        "trainer.layout.pp": (4, "the nodes"),
        "trainer.layout.ep": (8, "a node's devices"),
        "trainer.layout.first_stage_layers": (11, "43 = 11 + 11 + 11 + 10"),
        "trainer.layout.last_stage_layers": (10, "43 = 11 + 11 + 11 + 10; it has the head too"),
        "trainer.megatron.optimizer_offload_fraction": (0.75, "a quarter has room beside the engine"),
        "trainer.megatron.offload_weights": (
            False,
            "ROCm: the engine's sleep leaves memory held, so nothing is gained",
        ),
        "rollout.layout.memory_fraction": (0.5, "as it was run; by the plan 0.7 holds too"),
        "rollout.max_new_tokens": (8192, "the length that this layout was run with"),
        "rollout.sglang.engine_args.watchdog_timeout": (1800, "aiter tunes its products at first use, slowly"),
        **_rocm(),
    }


@overlay(NAME, hardware="h200", evidence="deepseek-v4-flash-h200-64")
def h200() -> Changes:
    """Eight nodes of eight: a stage a node."""
    return {
        "cluster.nodes": (8, "141 GB a device: eight stages"),
        "cluster.gpus_per_node": (8, "an HGX H200 has eight"),
        "trainer.layout.tp": (8, "a node's devices"),
        "trainer.layout.pp": (8, "the nodes"),
        "trainer.layout.ep": (8, "a node's devices"),
        "trainer.layout.first_stage_layers": (4, "43 = 4 + 6 × 6 + 3"),
        "trainer.layout.last_stage_layers": (3, "43 = 4 + 6 × 6 + 3; it has the head too"),
        **_cuda(),
        **ONE_CONNECTION,
    }


@overlay(NAME, hardware="gb300", evidence="deepseek-v4-flash-gb300-32")
def gb300() -> Changes:
    """Eight trays of four."""
    return {
        "cluster.nodes": (8, "as many stages"),
        "cluster.gpus_per_node": (4, "a compute tray has four"),
        "trainer.layout.tp": (2, "half a tray: the other half is context parallel"),
        "trainer.layout.cp": (2, "long answers over two devices"),
        "trainer.layout.cp_partition": ("contiguous", "the compressors' windows may not be cut by a zigzag"),
        "trainer.layout.pp": (8, "the trays"),
        "trainer.layout.ep": (4, "a tray's devices"),
        "trainer.layout.first_stage_layers": (4, "43 = 4 + 6 × 6 + 3"),
        "trainer.layout.last_stage_layers": (3, "43 = 4 + 6 × 6 + 3; it has the head too"),
        **_cuda(),
    }


@overlay(NAME, hardware="h100", evidence="deepseek-v4-flash-h100-64")
def h100() -> Changes:
    """80 GB a device: verl's layout with vLLM, all optimizer states in host memory."""
    return {
        "cluster.nodes": (8, "80 GB a device: eight stages"),
        "cluster.gpus_per_node": (8, "an HGX H100 has eight"),
        "trainer.layout.pp": (8, "the nodes"),
        "trainer.layout.ep": (8, "a node's devices"),
        "trainer.layout.sequence_parallel": (False, "there is no tensor parallelism"),
        "trainer.layout.stage_layers": ([6, 6, 6, 5, 5, 5, 5, 5], "verl's Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5L"),
        "trainer.megatron.implementation": ("verl", "its fork's rules"),
        "trainer.micro_batch_tokens": (12288, "one whole sequence, prompt and answer"),
        "trainer.packing": ("packed", "as verl's run: its kernels know where the sequences of a row begin"),
        "trainer.megatron.micro_batch": (None, "verl packs by tokens"),
        "trainer.weight_decay": (0.01, "as verl's run"),
        "trainer.beta2": (0.999, "as verl's run"),
        "algorithm.num_prompts": (8, "as verl's run"),
        "rollout.engine": ("vllm", "verl's engine"),
        "rollout.quantisation": ("mxfp4_experts", "80 GB a device: the experts in four bits"),
        "rollout.max_new_tokens": (10240, "as verl's run"),
        "rollout.temperature": (1.0, "as verl's run"),
        "rollout.num_slots": (1, "as verl's run: one sequence a rank"),
        "rollout.layout.tp": (1, "vLLM's experts go over data parallel ranks"),
        "rollout.layout.dp": (4, "an engine's four devices"),
        "rollout.layout.memory_fraction": (
            0.75,
            "the trainer is away while engines generate; verl's 0.5 leaves nothing for the cache, by the plan",
        ),
        "rollout.layout.kv_cache_dtype": ("fp8", "as verl's run"),
        "rollout.vllm.kv_cache_bytes": (None, "the cache is what memory_fraction leaves"),
        "refit.bucket_bytes": (512 << 20, "as verl's run"),
        **NO_NVLS,
    }


@overlay(f"{NAME}-4layer", hardware="mi355x", evidence="deepseek-v4-flash-4layer-mi355x-8")
def pruned_mi355x() -> Changes:
    """One node, one stage."""
    return {**_one_node(), "rollout.layout.memory_fraction": (0.5, "its launcher's on ROCm"), **_rocm()}


@overlay(f"{NAME}-4layer", hardware="h200", evidence="deepseek-v4-flash-4layer-8")
def pruned_h200() -> Changes:
    """One node, one stage."""
    return {**_one_node(), **_cuda(), **ONE_CONNECTION}


def _one_node() -> Changes:
    return {
        "cluster.gpus_per_node": (8, "one node"),
        "trainer.layout.tp": (8, "all devices"),
        "trainer.layout.ep": (8, "all devices"),
    }


def _sglang() -> Changes:
    return {
        "environment.engine.SGLANG_DSV4_FP4_EXPERTS": ("0", "a refit brings the experts in fp8, not in four bits"),
        "environment.engine.SGLANG_HEALTH_CHECK_TIMEOUT": ("120", "the first requests compile kernels for minutes"),
    }


def _rocm() -> Changes:
    """Variables for ROCm. SGLang up to 0.5.14 needs SGLANG_OPT_USE_COMPRESSOR_V2=true too; later ones don't read it."""
    return {
        **_sglang(),
        **ONE_CONNECTION,
        "environment.engine.SGLANG_HACK_FLASHMLA_BACKEND": ("unified_kv_triton", "the fastest kernels that agree"),
        "environment.engine.SGLANG_OPT_USE_TILELANG_INDEXER": ("true", "ROCm's kernel of the indexer"),
        "environment.engine.AITER_BF16_FP8_MOE_BOUND": ("0", "experts in fp8 whatever the batch's size"),
    }


def _cuda() -> Changes:
    """Variables for CUDA."""
    return {**_sglang(), **NO_NVLS}


# --- variants ---------------------------------------------------------------------------------------------------------


@variant(NAME, "bf16", group="training precision")
def bf16() -> Changes:
    """The recipe as it stands: products of the trainer in bf16."""
    return {}


@variant(NAME, "fp8", group="training precision", hardware=("mi355x", "h200", "gb300"))
def fp8() -> Changes:
    """Products of the trainer in fp8 with 128 × 128 blocks, as the engine's are. 80 GB don't hold the copies too."""
    return {
        "trainer.megatron.fp8": ("blockwise", "the engine's own blocks: less mismatch than bf16 against fp8"),
        "environment.trainer.NVTE_FP8_BLOCK_SCALING_FP32_SCALES": (
            "0",
            "scales are powers of two, as the engine's are",
        ),
    }


@variant(NAME, "fast", group="engine kernels")
def fast() -> Changes:
    """The recipe as it stands: the fastest kernels that pass the gate."""
    return {}


@variant(NAME, "parity", group="engine kernels", hardware=("mi355x",))
def parity() -> Changes:
    """The configuration whose agreement was published: tp8, triton attention, the plain norm; SGLang up to 0.5.17.
    Decode is 8 % slower."""
    return {
        "trainer.layout.tp": (8, "the layout that was measured (miles#2040)"),
        "rollout.layout.memory_fraction": (0.7, "what was measured; by the plan both fractions hold"),
        "rollout.max_new_tokens": (16384, "the length that was measured"),
        "environment.engine.SGLANG_HACK_FLASHMLA_BACKEND": ("triton", "the kernels that were measured"),
        "environment.engine.SGLANG_OPT_USE_JIT_NORM": ("false", "the fused norm drifts: 0.131 instead of 0.045"),
    }


@variant(NAME, "any-order", group="order of sums")
def any_order() -> Changes:
    """The recipe as it stands: kernels may add in any order."""
    return {}


@variant(NAME, "deterministic", group="order of sums")
def deterministic() -> Changes:
    """Two runs give the same bits: slower kernels and collectives of one order."""
    return DETERMINISTIC
