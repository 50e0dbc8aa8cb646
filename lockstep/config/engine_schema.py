"""The sections of the rollout engine and of its refits. ``schema.py`` puts them into the whole configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lockstep.config.cluster_schema import EngineLayoutConfig, SglangConfig
from lockstep.config.section import Dtype, Quantisation, Section


class VllmConfig(Section):
    """Settings of the vLLM engine alone."""

    kv_cache_bytes: int | None = Field(
        default=1 << 30,
        ge=1 << 20,
        description="Memory of cached keys and values; given in bytes because the trainer may live on the same device. "
        "none: what rollout.layout.memory_fraction leaves.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Longest prompt and answer together; none: prompt.max_tokens + rollout.max_new_tokens, or the "
        "model's context where that is less.",
    )
    enforce_eager: bool = Field(
        default=True,
        description="No compilation and no captured graphs: a start of seconds instead of minutes, slower decoding.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="More arguments of vLLM's engine, of those that don't decide what is sampled, by which weights or "
        "where; others are refused with the list.",
    )


class RolloutConfig(Section):
    """The rollout engine and how it samples."""

    engine: Literal["torch", "vllm", "sglang"] = Field(
        default="torch",
        description="torch: embedded, transformers' modules; vllm: vLLM, in the trainer's process or, with "
        'rollout.process = "separate", in its own (needs its own environment); sglang: planned for, not run yet.',
    )
    process: Literal["inline", "separate"] = Field(
        default="inline",
        description="inline: the engine runs in the trainer's process; separate: in its own, which ends with it.",
    )
    python: str | None = Field(
        default=None,
        description="For separate: the interpreter of an environment with Lockstep and the engine; none: this one.",
    )
    num_slots: int = Field(default=64, ge=1, description="Sequences decoded at once (continuous batching).")
    max_new_tokens: int = Field(default=256, ge=1, description="Longest completion, in tokens.")
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature; log-probs on both sides are of it."
    )
    top_k: int = Field(default=0, ge=0, description="0: off. Truncated sampling is refused for training.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="1: off. Refused below, as top_k.")
    min_p: float = Field(default=0.0, ge=0, lt=1, description="0: off. Refused above, as top_k.")
    stop_strings: tuple[str, ...] = Field(default=(), description="Texts that end a completion.")
    dtype: Dtype = Field(default="bfloat16", description="Weights and activations of the engine.")
    quantisation: Quantisation = Field(
        default="none",
        description="How the engine's weights are quantised at each refit. fp8: linears and experts in e4m3, 128 × 128 "
        "blocks, float32 scales; fp8_ue8m0: the same with power-of-two scales; mxfp4_experts: experts in mxfp4. The "
        "torch engine computes with them dequantised. It needs bounds of its own.",
    )
    fast_path: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: the hand-written decoder where the architecture has one; off: transformers' modules.",
    )
    prefill_tokens: int = Field(default=4096, ge=1, description="Most prompt tokens in one prefill forward.")
    record_routes: bool = Field(default=False, description="Record expert ids of MoE layers with each rollout.")
    layout: EngineLayoutConfig = EngineLayoutConfig()
    vllm: VllmConfig = VllmConfig()
    sglang: SglangConfig = SglangConfig()


class RefitConfig(Section):
    """How the engine gets the trainer's weights."""

    transport: Literal["auto", "local", "shared", "shm", "disk", "cuda_ipc"] = Field(
        default="auto",
        description="auto: local where the engine is in this process, shm where it has its own. local: copied into the "
        "engine's own storage; shared: the engine aliases the trainer's; shm: buckets in shared memory; disk: files in "
        "refit.folder; cuda_ipc: buckets in GPU memory.",
    )
    bucket_bytes: int = Field(
        default=16 << 20,
        ge=1,
        description="Size of a bucket of shm, disk and cuda_ipc, of which two are in flight; an atomic group that is "
        "larger gets a bucket of its own size. Smaller ones cost more messages, larger ones more memory.",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Longest silence between trainer and an engine in its own process before either side gives up; "
        "above any single step, load or compilation of an engine.",
    )
    folder: str | None = Field(default=None, description="For disk: a folder that trainer and engine both see.")
    verify_every: int = Field(
        default=50, ge=1, description="Steps between byte verifications (also at refits 1 and 2)."
    )
