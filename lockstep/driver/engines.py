"""The rollout engine of a configuration, in this process or (``remote.py``) in one of its own.

``torch`` owns a copy of the trainer's module. ``vllm`` starts with random weights from the model's configuration alone:
its weights come with the first refit, before anything is sampled.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lockstep.config.schema import RunConfig
from lockstep.driver.remote import start_separate_engine
from lockstep.interfaces import Engine
from lockstep.model.load import torch_dtype
from lockstep.model.weights import ModelWeights
from lockstep.refit.derived import Registry
from lockstep.refit.names import as_checkpoint
from lockstep.refit.quantised_config import served_section
from lockstep.rollout.remote_engine import RemoteEngine
from lockstep.rollout.torch_engine import TorchEngine
from lockstep.rollout.vllm_folder import write_model_folder
from lockstep.rollout.vllm_start import VllmSettings
from lockstep.spans import span


@runtime_checkable
class Closing(Protocol):
    """An engine that holds what the end of a run must let go of."""

    def close(self) -> None: ...


def build_engine(
    config: RunConfig,
    model: Any,
    *,
    decode: Callable[[list[int]], str],
    vocab_limit: int,
    max_prompt_tokens: int,
) -> Engine:
    """The engine for ``model``, the trainer's. ``decode`` keeps special tokens: a stop string may be one.

    Raises EngineUnavailable, with the way out, where vLLM is asked for and can't be started.
    """
    if config.rollout.process == "separate":
        longest = served_length(config, model, max_prompt_tokens)
        section = quantisation_section(config, model) if config.rollout.engine == "vllm" else None
        return start_separate_engine(
            config, model, vocab_limit=vocab_limit, max_model_len=longest, quantisation=section
        )
    if config.rollout.engine == "torch":
        own = copy.deepcopy(model).to(torch_dtype(config.rollout.dtype))
        return TorchEngine(own, config.rollout, decode=decode, vocab_limit=vocab_limit)
    from lockstep.rollout.vllm_engine import VllmEngine

    with span("start/vllm"), tempfile.TemporaryDirectory(prefix="lockstep-vllm-") as folder:
        write_model_folder(model, Path(folder), quantisation=quantisation_section(config, model))
        settings = VllmSettings.of(
            config.rollout,
            folder,
            max_model_len=served_length(config, model, max_prompt_tokens),
            vocab_limit=vocab_limit,
        )
        return VllmEngine(settings, decode=decode, derived=derived_state(), device=model.device.type)


def quantisation_section(config: RunConfig, model: Any) -> dict[str, Any] | None:
    """The ``quantization_config`` of an engine that loads by checkpoint names; None where nothing is quantised."""
    if config.rollout.quantisation == "none":
        return None
    return served_section(as_checkpoint(ModelWeights(model, 0)).manifest(), config.rollout.quantisation)


def served_length(config: RunConfig, model: Any, max_prompt_tokens: int) -> int | None:
    """Tokens of the longest prompt and answer together that the engine takes where that is less than the model's
    context; None: the context alone is the limit. vLLM's is as configured, or what the run can ask for at most."""
    if config.rollout.engine == "torch":
        return None
    context = context_of(model)
    wanted = config.rollout.vllm.max_model_len or max_prompt_tokens + config.rollout.max_new_tokens
    return wanted if context is None else min(wanted, context)


def context_of(model: Any) -> int | None:
    """Tokens that a model's positions reach; None where its configuration has no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def derived_state() -> Registry:
    """The registry of what vLLM derives from its weights and its layout: a refit refreshes it."""
    from lockstep.refit.derived_vllm import registry

    return registry()


def engine_reads(engine: Engine) -> dict[str, list[str]] | None:
    """The variables that an engine in a process of its own has looked up at its start; None where it has none."""
    return engine.process.started["reads"] if isinstance(engine, RemoteEngine) else None


def close_engine(engine: Engine) -> None:
    """End what the engine holds, if it holds anything beyond memory of this process."""
    if isinstance(engine, Closing):
        engine.close()
