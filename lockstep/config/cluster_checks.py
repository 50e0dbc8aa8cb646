"""Rules of what a run is spread on: settings that only one trainer or engine reads, and who has which devices.

What sizes may be (divisors, stages, memory) is for ``lockstep plan``: ``topology/layout.py`` has those rules with their
sources. Here is what would be accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.config.algorithm_checks import inert, rule
from lockstep.config.cluster_schema import EngineLayoutConfig, MegatronConfig, TrainLayoutConfig
from lockstep.config.errors import Violation
from lockstep.config.schema import RunConfig

OF_FSDP = ("replicate",)
"""Keys of ``trainer.layout`` that the fsdp trainer reads; all others are Megatron's."""

ENGINE_LAYOUT_IGNORED = {"vllm": ("dp_attention", "max_total_tokens"), "sglang": ()}
"""Keys of ``rollout.layout`` that an engine does not read. The torch engine, on the trainer's device, reads none."""

SGLANG_ENGINE_ARGS = {
    "attention_backend": "which attention kernels",
    "context_length": "a limit above which requests are refused",
    "cuda_graph_max_bs_decode": "how large a batch is captured",
    "deepep_mode": "how the all-to-all runs",
    "disable_custom_all_reduce": "which all-reduce",
    "disable_radix_cache": "whether prefixes are shared",
    "dsa_decode_backend": "which kernels of sparse attention",
    "dsa_prefill_backend": "which kernels of sparse attention",
    "enable_dp_lm_head": "how the head is spread",
    "enable_multimodal": "whether images are taken",
    "fp8_gemm_backend": "which kernels of fp8 products",
    "mamba_radix_cache_strategy": "how convolution states are kept",
    "moe_dense_tp_size": "how dense layers are spread",
    "moe_runner_backend": "which kernels of experts",
    "page_size": "tokens of one page of cached keys and values",
    "speculative_eagle_topk": "width of the draft",
    "speculative_num_draft_tokens": "tokens of a draft",
    "speculative_num_steps": "depth of the draft",
    "watchdog_timeout": "after how long a stuck engine ends itself",
}
"""Arguments of SGLang's server that change how it computes, and neither what it samples from nor the weights' form."""


@rule
def settings_belong_to_the_trainer(config: RunConfig) -> Iterator[Violation]:
    """Model parallelism and ``[trainer.megatron]`` are Megatron's; replicas and checkpointed layers are fsdp's."""
    trainer, also = config.trainer, ("trainer.backend",)
    if trainer.backend == "fsdp":
        names = " ".join(name for name in TrainLayoutConfig.model_fields if name not in OF_FSDP)
        yield from inert(trainer.layout, "trainer.layout", names, "with the fsdp trainer", also)
        names = " ".join(MegatronConfig.model_fields)
        yield from inert(trainer.megatron, "trainer.megatron", names, "with the fsdp trainer", also)
    else:
        because = "with the megatron trainer"
        yield from inert(trainer.layout, "trainer.layout", " ".join(OF_FSDP), because, also)
        because = "with the megatron trainer (trainer.megatron.recompute is its own)"
        yield from inert(trainer, "trainer", "gradient_checkpointing", because, also)
        if trainer.packing == "shared_prompt":
            yield Violation(
                "trainer.packing",
                "Megatron does not share a prompt between its samples",
                'use "packed", or "padded"',
                also,
                allowed='"auto", "packed", "padded", "single"',
            )


@rule
def layout_belongs_to_the_engine(config: RunConfig) -> Iterator[Violation]:
    """The torch engine lives on the trainer's device and has no layout; vLLM has no DP attention of its own kind."""
    engine = config.rollout.engine
    ignored = ENGINE_LAYOUT_IGNORED.get(engine, tuple(EngineLayoutConfig.model_fields))
    because = f"with the {engine} engine"
    yield from inert(config.rollout.layout, "rollout.layout", " ".join(ignored), because, ("rollout.engine",))
    if engine != "sglang":
        yield from inert(config.rollout.sglang, "rollout.sglang", "engine_args", because, ("rollout.engine",))


@rule
def sglang_has_processes_of_its_own(config: RunConfig) -> Iterator[Violation]:
    """SGLang's server and its schedulers are processes of their own, whatever the trainer is."""
    if config.rollout.engine == "sglang" and config.rollout.process == "inline":
        way_out = 'set rollout.process = "separate"'
        yield Violation("rollout.process", "SGLang runs in its own processes", way_out, ("rollout.engine",))


@rule
def sglang_engine_args_are_harmless(config: RunConfig) -> Iterator[Violation]:
    """As for vLLM: an argument that decides what is sampled, by which weights or where has a key of its own."""
    for name in sorted(config.rollout.sglang.engine_args.keys() - SGLANG_ENGINE_ARGS.keys()):
        yield Violation(
            "rollout.sglang.engine_args",
            f"{name} is none of those that leave sampling and weights alone",
            f"remove {name}, or use the setting of Lockstep that decides it",
            allowed=", ".join(SGLANG_ENGINE_ARGS),
        )


@rule
def vllm_sizes_its_cache_once(config: RunConfig) -> Iterator[Violation]:
    """vLLM's cache is a number of bytes or what a fraction of the card leaves; the bytes would win silently."""
    fraction = config.rollout.layout.memory_fraction
    if config.rollout.engine == "vllm" and fraction is not None and config.rollout.vllm.kv_cache_bytes is not None:
        yield Violation(
            "rollout.layout.memory_fraction",
            "has no effect while rollout.vllm.kv_cache_bytes gives the cache's size",
            "set rollout.vllm.kv_cache_bytes=none, or leave memory_fraction out",
            ("rollout.vllm.kv_cache_bytes",),
        )


@rule
def vllm_has_no_expert_size_of_its_own(config: RunConfig) -> Iterator[Violation]:
    """vLLM's expert parallelism is on or off: on, it has all tensor- and data-parallel ranks, whatever is asked for."""
    layout = config.rollout.layout
    ranks = layout.tp * layout.dp
    if config.rollout.engine == "vllm" and layout.ep not in (1, ranks):
        yield Violation(
            "rollout.layout.ep",
            f"vLLM spreads experts over all tp · dp = {ranks} ranks or over none: {layout.ep} is no choice",
            f"set rollout.layout.ep = {ranks}, or 1",
            ("rollout.layout.tp", "rollout.layout.dp"),
        )


@rule
def a_kind_of_hardware_has_its_device(config: RunConfig) -> Iterator[Violation]:
    """The kind of device that a layout's evidence is about is the one that the run is on."""
    kind, device = config.cluster.hardware, config.device
    if kind is not None and device != "auto" and (kind == "cpu") != (device == "cpu"):
        message = f"is {device}, and cluster.hardware is {kind}: the run would not be on what it names"
        yield Violation("device", message, 'set device = "auto", or leave cluster.hardware out', ("cluster.hardware",))


@rule
def devices_are_the_trainers_or_the_engines(config: RunConfig) -> Iterator[Violation]:
    """Colocated engines have the trainer's devices; engines apart need some, and must leave some."""
    cluster = config.cluster
    total = cluster.nodes * cluster.gpus_per_node
    if cluster.colocated:
        yield from inert(cluster, "cluster", "rollout_gpus", "with colocated engines", ("cluster.colocated",))
    elif not 0 < cluster.rollout_gpus < total:
        way_out = f"use 1 to {total - 1}" if total > 1 else "use more devices, or cluster.colocated = true"
        message = f"engines apart from the trainer can't have {cluster.rollout_gpus} of {total} devices"
        yield Violation("cluster.rollout_gpus", message, way_out, ("cluster.colocated",))
