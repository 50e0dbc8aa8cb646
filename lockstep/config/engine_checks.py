"""Rules of the rollout engine: settings that only one engine has, and what vLLM may be told."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.config.algorithm_checks import inert, rule
from lockstep.config.errors import Violation
from lockstep.config.schema import RunConfig

VLLM_ENGINE_ARGS = {
    "attention_backend": "which attention kernels",
    "attention_config": "their settings",
    "block_size": "tokens of one block of cached keys and values",
    "compilation_config": "what is compiled and captured",
    "enable_chunked_prefill": "whether long prompts are computed in pieces",
    "enable_sleep_mode": "whether memory can be given back between steps",
    "gpu_memory_utilization": "a limit that vLLM checks at its start",
    "kernel_config": "which kernels",
    "linear_backend": "which kernels of matrix products",
    "long_prefill_token_threshold": "what counts as a long prompt",
    "moe_backend": "which kernels of experts",
}
"""Arguments of vLLM's engine that change how it computes, and neither what it samples from nor the weights' form."""

_NOT_REFITTED = {
    "speculative_config": "starts a drafter, whose weights no refit brings: it would draft with an old policy's",
    "enable_lora": "makes room for adapters, which no refit brings: the engine would sample from the base weights",
}
"""Refused like any other, with a reason of their own."""


@rule
def settings_belong_to_the_engine(config: RunConfig) -> Iterator[Violation]:
    """The hand-written decoder is the torch engine's; ``[rollout.vllm]`` is vLLM's."""
    because = f"with the {config.rollout.engine} engine"
    if config.rollout.engine != "torch":
        yield from inert(config.rollout, "rollout", "fast_path", because, ("rollout.engine",))
    if config.rollout.engine == "vllm":
        return
    names = "kv_cache_bytes max_model_len enforce_eager engine_args"
    yield from inert(config.rollout.vllm, "rollout.vllm", names, because, ("rollout.engine",))


@rule
def vllm_owns_its_weights(config: RunConfig) -> Iterator[Violation]:
    """vLLM lays weights out for its kernels, fused and packed: they can't be the trainer's own storage."""
    if config.rollout.engine == "vllm" and config.refit.transport == "shared":
        yield Violation(
            "refit.transport",
            "vLLM fuses and packs its weights, it can't alias the trainer's",
            'set refit.transport = "local"',
            ("rollout.engine",),
        )


@rule
def vllm_serves_fp8_in_bfloat16(config: RunConfig) -> Iterator[Violation]:
    """vLLM refuses float32 beside fp8 weights (``Fp8Config.get_supported_act_dtypes``)."""
    rollout = config.rollout
    if rollout.engine == "vllm" and rollout.quantisation.startswith("fp8") and rollout.dtype == "float32":
        message, way_out = "vLLM computes with fp8 weights in bfloat16 alone", 'set rollout.dtype = "bfloat16"'
        yield Violation("rollout.dtype", message, way_out, ("rollout.engine", "rollout.quantisation"))


@rule
def vllm_has_its_own_head(config: RunConfig) -> Iterator[Violation]:
    """vLLM computes its head in the dtype of its weights: a float32 head would be on one side only."""
    if config.rollout.engine == "vllm" and config.head_dtype == "float32" and config.rollout.dtype != "float32":
        yield Violation(
            "head_dtype",
            "vLLM's head computes in rollout.dtype, so float32 would hold for the trainer alone",
            'set head_dtype = "model", or rollout.dtype = "float32"',
            ("rollout.engine", "rollout.dtype"),
        )


@rule
def vllm_engine_args_are_harmless(config: RunConfig) -> Iterator[Violation]:
    """An engine argument could change the sampling distribution, the weights or their place behind everything that is
    measured here: only those known not to are taken."""
    for name in sorted(config.rollout.vllm.engine_args.keys() - VLLM_ENGINE_ARGS.keys()):
        yield Violation(
            "rollout.vllm.engine_args",
            f"{name} {_NOT_REFITTED.get(name, 'is none of those that leave sampling and weights alone')}",
            f"remove {name}, or use the setting of Lockstep that decides it",
            allowed=", ".join(VLLM_ENGINE_ARGS),
        )


@rule
def a_prompt_and_an_answer_fit_vllm(config: RunConfig) -> Iterator[Violation]:
    """With less room than a prompt of one token and the longest answer, no completion could reach its length."""
    length = config.rollout.vllm.max_model_len
    if config.rollout.engine == "vllm" and length is not None and length <= config.rollout.max_new_tokens:
        yield Violation(
            "rollout.vllm.max_model_len",
            f"leaves no room for a prompt before {config.rollout.max_new_tokens} new tokens",
            f"use more than {config.rollout.max_new_tokens}, or fewer new tokens",
            ("rollout.max_new_tokens",),
        )


@rule
def vllm_samples_at_the_temperature(config: RunConfig) -> Iterator[Violation]:
    """vLLM refuses temperatures above 2, and raises those below 0.01 to 0.01 without a word to the caller."""
    if config.rollout.engine == "vllm" and not 0.01 <= config.rollout.temperature <= 2:
        yield Violation(
            "rollout.temperature",
            "vLLM samples at temperatures from 0.01 to 2",
            'use one of these, or rollout.engine = "torch"',
            ("rollout.engine",),
        )
