"""vLLM under check. It is imported when it is started, by ``rollout/vllm_*.py`` alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.interfaces import WeightSource
from lockstep.refit.bisect import Outputs, recorded_outputs
from lockstep.refit.derived_vllm import registry
from lockstep.refit.transports import whole_tensors
from lockstep.rollout.vllm_engine import VllmEngine
from lockstep.rollout.vllm_hooks import served_model
from lockstep.rollout.vllm_plain import forward_once, push_plainly
from lockstep.rollout.vllm_start import VllmSettings

KV_CACHE_BYTES = 64 << 20


class VllmSubject:
    """See ``subjects.Subject``."""

    def __init__(self, folder: Path, dtype: str, *, weights: bool, context: int, derived: bool) -> None:
        settings = VllmSettings(
            model_folder=str(folder),
            dtype=dtype,
            load_format="safetensors" if weights else "dummy",
            max_model_len=context,
            num_slots=8,
            kv_cache_bytes=KV_CACHE_BYTES,
        )
        self.engine = VllmEngine(settings, derived=registry() if derived else None)

    def push_plain(self, source: WeightSource) -> None:
        """transformers' module names into vLLM's reload, which reports success."""
        push_plainly(self.engine.llm, whole_tensors(source))
        self.engine.refit_committed(source.manifest().version)
        self.engine.refit_over()

    def outputs(self, tokens: np.ndarray) -> Outputs:
        """By one prefill, past the engine's own queue: a refused refit leaves the engine unfit, and is looked into."""
        with recorded_outputs(served_model(self.engine.llm)) as found:
            forward_once(self.engine.llm, [int(token) for token in tokens])
        return found

    def close(self) -> None:
        """End the engine and give its memory back."""
        self.engine.close()
