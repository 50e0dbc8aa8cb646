"""The rollout engine of a configuration in a process of its own: its settings as plain data, and its start."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from lockstep.config.schema import RunConfig
from lockstep.driver.environment import engine_environment
from lockstep.refit.engine_child import start_engine
from lockstep.rollout.remote_engine import RemoteEngine
from lockstep.rollout.vllm_folder import write_model_folder
from lockstep.rollout.vllm_start import VllmSettings
from lockstep.spans import span


def start_separate_engine(
    config: RunConfig,
    model: Any,
    *,
    vocab_limit: int,
    max_model_len: int | None,
    quantisation: dict[str, Any] | None = None,
) -> RemoteEngine:
    """Start ``rollout.engine`` for the architecture of ``model``, the trainer's, in a process of its own.
    ``quantisation``: the ``quantization_config`` that vLLM starts with.

    No weights go along: the engine starts from random ones and serves nothing until a refit commits.
    """
    settings: dict[str, Any] = {
        "engine": config.rollout.engine,
        "threads": torch.get_num_threads(),
        "device": model.device.type,
        "tokenizer": config.model.model_dump(mode="json"),
    }
    with span("start/engine"), tempfile.TemporaryDirectory(prefix="lockstep-engine-") as folder:
        if config.rollout.engine == "vllm":
            write_model_folder(model, Path(folder), quantisation=quantisation)
            vllm = VllmSettings.of(config.rollout, folder, max_model_len=max_model_len, vocab_limit=vocab_limit)
            settings["vllm"] = vllm.as_dict()
        else:
            settings |= {
                "model_config": json.loads(model.config.to_json_string(use_diff=False)),
                "model_dtype": str(model.dtype).removeprefix("torch."),
                "rollout": config.rollout.model_dump(mode="json"),
                "head_dtype": config.head_dtype,
                "vocab_limit": vocab_limit,
            }
        return start_engine(
            settings,
            timeout_s=config.refit.timeout_s,
            python=config.rollout.python,
            environment=engine_environment(config),
        )
