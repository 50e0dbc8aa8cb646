"""Settings of a vLLM engine as plain data, and its start inside this process.

    VllmSettings ──▶ engine_arguments (checked against what the installed vLLM knows) ──▶ vllm.LLM, in-process

What decides the sampling distribution, the weights or the place of the engine is fixed here and can't be overridden:
float log-probs of the *sampling* distribution, no quantisation behind one's back, one worker in this process, no
asynchronous scheduling (a token would be stamped with a version that it was not sampled by), no defaults from a
``generation_config.json``. Features are detected, versions are not compared.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lockstep.config.schema import RolloutConfig
from lockstep.records import Quantisation


class EngineUnavailable(RuntimeError):
    """vLLM can't be started here; the text says why and what to do."""


NOT_INSTALLED = (
    'vLLM is not installed in this environment: rollout.engine = "vllm" needs it. Run `make setup-vllm` and use '
    "that environment's interpreter (.venv-vllm/bin/lockstep …, or as rollout.python for an engine in a process of its "
    "own), or install the extra: pip install 'lockstep-rl[vllm]'"
)

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: a refit reaches its modules
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # one position more than the context, so that a full one can be scored
}
DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # results go to stdout
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a folder: nothing is looked up
}


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Everything that a ``VllmEngine`` is made from; survives JSON.

    ``model_folder`` holds ``config.json`` (``write_model_folder``); with ``load_format`` "dummy" the weights are
    random until a refit, with "safetensors" they are the folder's. ``max_model_len``: longest prompt and answer
    together, in tokens (None: the model's context). The cache has ``kv_cache_bytes``, or what ``memory_fraction`` of
    the card leaves. ``version``: of the folder's weights. ``quantisation``: the scheme of the manifests that it takes,
    which the folder's ``quantization_config`` says too.
    """

    model_folder: str
    dtype: str = "bfloat16"
    load_format: Literal["dummy", "safetensors"] = "dummy"
    max_model_len: int | None = None
    num_slots: int = 64
    prefill_tokens: int = 4096
    kv_cache_bytes: int | None = 1 << 30
    memory_fraction: float | None = None
    enforce_eager: bool = True
    temperature: float = 1.0
    record_routes: bool = False
    vocab_limit: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    version: int = 0
    quantisation: Quantisation = "none"
    engine_args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RolloutConfig, model_folder: str, **more: Any) -> VllmSettings:
        """The settings of a run's ``[rollout]``; ``more`` are fields that it does not have."""
        vllm = config.vllm
        return cls(
            model_folder=model_folder,
            **{
                "dtype": config.dtype,
                "max_model_len": vllm.max_model_len,
                "num_slots": config.num_slots,
                "prefill_tokens": config.prefill_tokens,
                "kv_cache_bytes": vllm.kv_cache_bytes,
                "memory_fraction": config.layout.memory_fraction,
                "enforce_eager": vllm.enforce_eager,
                "temperature": config.temperature,
                "record_routes": config.record_routes,
                "quantisation": config.quantisation,
                "engine_args": dict(vllm.engine_args),
                **more,
            },
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> VllmSettings:
        """From parsed JSON. Raises ValueError for a key that is none."""
        known = {one.name for one in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"unknown settings of a vLLM engine: {', '.join(unknown)}; known are {sorted(known)}")
        return cls(**{**values, "stop_token_ids": tuple(values.get("stop_token_ids", ()))})

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def import_vllm() -> Any:
    """The ``vllm`` package, with the environment that this engine needs. Raises EngineUnavailable if it is absent."""
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise EngineUnavailable(NOT_INSTALLED) from error
        raise
    return vllm


def start_llm(settings: VllmSettings, *, device: str | None = None) -> Any:
    """A ``vllm.LLM`` whose engine core and single worker live in this process.

    ``device`` ("cpu", "cuda"): what the run computes on; vLLM's builds are for one platform each. Raises
    EngineUnavailable where they differ, for an engine argument that the installed vLLM does not have, and where vLLM
    raises, with what it said.
    """
    with _globals_kept():
        vllm = import_vllm()
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        platform = str(current_platform.device_type)
        if device is not None and platform != device:
            raise EngineUnavailable(
                f"the installed vLLM computes on {platform}, the run on {device}: install vLLM's build for {device}, "
                f'or set device = "{platform}"'
            )
        known = _known_arguments()
        if not settings.record_routes and "enable_trace_replay" not in known:
            # Tokens to be scored by decoding are forced through model runner V1's sampler; V2 needs trace replay.
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        try:
            llm = vllm.LLM(**engine_arguments(settings, known, on_cpu=platform == "cpu"))
        except EngineUnavailable:
            raise
        except Exception as error:  # it has no type of its own for what it can't do
            what = f"{settings.quantisation} weights"
            if settings.quantisation == "none":  # not by transformers: its classes give way to vLLM's own
                described = json.loads((Path(settings.model_folder) / "config.json").read_text(encoding="utf-8"))
                what = f"a model of type {described.get('model_type')}"
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:_CAUSE]}"
            raise EngineUnavailable(f"vLLM can't serve {what} here: {cause}") from error
    _started.add(id(llm))
    return llm


_CAUSE = 600
"""Characters of vLLM's own words that are passed on."""

_started: set[int] = set()
"""Engines of this process that were not stopped."""


def stop_llm(llm: Any) -> None:
    """End the engine core. vLLM's own end also takes down the process groups, which all engines of a process share:
    that is left to the last one."""
    _started.discard(id(llm))
    client = llm.llm_engine.engine_core
    finalizer = getattr(client, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
    core = client.engine_core
    if _started:
        with _workspace_kept():
            core.model_executor.shutdown()
        core.scheduler.shutdown()
    else:
        core.shutdown()
    gc.unfreeze()  # vLLM freezes its start-up heap, and the model with it


@contextmanager
def _workspace_kept() -> Iterator[None]:
    """On a GPU a worker's end also drops the buffers that MoE kernels of all engines of the process work in."""
    try:
        from vllm.v1.worker import workspace  # pyright: ignore[reportMissingImports]
    except ImportError:
        yield
        return
    manager = getattr(workspace, "_manager", None)
    yield
    if manager is not None:
        workspace._manager = manager


def engine_arguments(settings: VllmSettings, known: set[str], *, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``. ``known``: those that the installed one has; raises EngineUnavailable if
    ``settings.engine_args`` has others, or one that is fixed."""
    fixed: dict[str, Any] = {
        "model": settings.model_folder,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "dtype": settings.dtype,
        "load_format": settings.load_format,
        "max_num_seqs": settings.num_slots,
        "enforce_eager": settings.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "async_scheduling": False,
        # A position that is served from the cache has no expert ids.
        "enable_prefix_caching": not settings.record_routes,
        "max_num_batched_tokens": max(settings.prefill_tokens, settings.num_slots),
        "disable_log_stats": True,
    }
    if settings.kv_cache_bytes is not None:
        fixed["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if settings.memory_fraction is not None:
        fixed["gpu_memory_utilization"] = settings.memory_fraction
    text_config = _text_config(settings.model_folder)
    context = getattr(text_config, "max_position_embeddings", None)
    if longest := settings.max_model_len or context:
        fixed["max_model_len"] = longest + 1  # see VLLM_ALLOW_LONG_MAX_MODEL_LEN above
    if not on_cpu:  # both need model runner V2, which needs Triton
        fixed |= {"enable_trace_replay": True} if "enable_trace_replay" in known else {}
        if settings.record_routes and "enable_return_routed_experts" in known:
            fixed["enable_return_routed_experts"] = True
    given = dict(settings.engine_args)
    if on_cpu:
        fixed |= _whole_prompts(given, fixed["max_num_batched_tokens"], fixed.get("max_model_len"))
    if on_cpu and getattr(text_config, "kv_lora_rank", None) is not None:
        # The CPU build's rotary operator is wrong for queries of several heads in three dimensions.
        mend = {"custom_ops": ["none", "-rotary_embedding"]}
        given["compilation_config"] = mend | given.get("compilation_config", {})
        if settings.dtype == "float32" and "attention_backend" in known:
            given.setdefault("attention_backend", "CPU_MLA")  # the one for AMX, taken where it is, has no float32
    if wrong := sorted(given.keys() & fixed.keys()):
        raise EngineUnavailable(f"rollout.vllm.engine_args: {', '.join(wrong)} is decided by Lockstep: remove it")
    if unknown := sorted(given.keys() - known):
        raise EngineUnavailable(f"rollout.vllm.engine_args: the installed vLLM has no argument {', '.join(unknown)}")
    absent = fixed.keys() - known
    if needed := sorted(absent & {"logprobs_mode", "kv_cache_memory_bytes", "skip_tokenizer_init"}):
        raise EngineUnavailable(f"the installed vLLM has no {', '.join(needed)}: it is too old for Lockstep (try 0.24)")
    return {name: value for name, value in fixed.items() if name not in absent} | given


def _whole_prompts(given: dict[str, Any], prefill_tokens: int, max_model_len: int | None) -> dict[str, Any]:
    """What keeps vLLM from prefilling a prompt in pieces: it turns a request's random generator back after each of
    them, which PyTorch's on a CPU can't ("CPU Generator does not use offset"), and every request has its seed.
    ``prefill_tokens`` must hold the longest sequence then, which a preempted request may have become. The two arguments
    that would ask for pieces are taken out of ``given``, and refused if they do."""
    for name in ("enable_chunked_prefill", "long_prefill_token_threshold"):
        if given.pop(name, None):
            raise EngineUnavailable(
                f"rollout.vllm.engine_args: {name} lets vLLM compute prompts in pieces, which it can't on a CPU for "
                "requests that have a seed, as all here: remove it"
            )
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(prefill_tokens, max_model_len or 0)}


def _known_arguments() -> set[str]:
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    return set(inspect.signature(EngineArgs).parameters)


def _text_config(model_folder: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_folder).get_text_config()


@contextmanager
def _globals_kept() -> Iterator[None]:
    """vLLM's start seeds every global random stream, and its CPU worker replaces ``torch.set_num_threads``: neither is
    its own in a process that also trains."""
    set_num_threads, num_threads, dtype = torch.set_num_threads, torch.get_num_threads(), torch.get_default_dtype()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
