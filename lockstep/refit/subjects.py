"""Engines as a check drives them: started with random weights or from disk, refitted, looked into module by module.

Each adds to ``interfaces.Engine`` what a check needs beside it: the outputs of every module, and a *plain push*, which
is what a trainer does that hands its names to the engine's own loader and believes its success.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from lockstep.config.schema import PathModel, RolloutConfig
from lockstep.interfaces import Engine, WeightSource
from lockstep.model.load import load_model, torch_dtype
from lockstep.refit.bisect import Outputs, recorded_outputs
from lockstep.refit.names import as_checkpoint
from lockstep.refit.probes import holding_live
from lockstep.refit.transports import whole_tensors
from lockstep.rollout.torch_engine import TorchEngine

EngineName = Literal["torch", "vllm"]
DUMMY_SEED = 20_011


class Subject(Protocol):
    """An engine under check."""

    @property
    def engine(self) -> Engine: ...

    def push_plain(self, source: WeightSource) -> None:
        """Hand the tensors to the engine's own loader with names that it does not all know; no manifest, no claim."""
        ...

    def outputs(self, tokens: np.ndarray) -> Outputs:
        """Every module's output in a forward of ``tokens`` [T], with the weights that the engine computes with."""
        ...

    def close(self) -> None: ...


def start_subject(
    name: EngineName, folder: Path, *, dtype: str, weights: bool, context: int, derived: bool = True
) -> Subject:
    """An engine over the model of ``folder``: with its weights, or with random ones until a refit.

    ``derived`` False leaves the registry of derived state out. ``context``: the longest sequence that is scored.
    """
    if name == "torch":
        return _TorchSubject(folder, dtype, weights)
    from lockstep.refit.subjects_vllm import VllmSubject

    return VllmSubject(folder, dtype, weights=weights, context=context, derived=derived)


class _TorchSubject:
    def __init__(self, folder: Path, dtype: str, weights: bool) -> None:
        if weights:
            self._model: Any = load_model(PathModel(path=str(folder)), torch_dtype(dtype))
        else:
            self._model = _random_weights(folder, torch_dtype(dtype))
        self.engine = TorchEngine(self._model, RolloutConfig(dtype=dtype, num_slots=8))  # pyright: ignore[reportArgumentType]

    def push_plain(self, source: WeightSource) -> None:
        """Checkpoint names into transformers' module, unknown ones ignored: fused expert stacks stay as they were."""
        version = source.manifest().version
        tensors = dict(whole_tensors(as_checkpoint(source)))
        self._model.load_state_dict(tensors, strict=False)
        self.engine.decoder.refresh()
        self.engine.refit_committed(version)
        self.engine.refit_over()

    def outputs(self, tokens: np.ndarray) -> Outputs:
        with (
            torch.no_grad(),
            holding_live(self._model, self.engine.receiver().live()),
            recorded_outputs(self._model) as found,
        ):
            self._model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
        return found

    def close(self) -> None:
        del self.engine, self._model


def _random_weights(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(DUMMY_SEED)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
