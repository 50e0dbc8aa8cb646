"""What another program does with vLLM: a plain push of tensors into its reload, and a plain prefill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lockstep.rollout.vllm_hooks import served_model
from lockstep.rollout.vllm_reload import LayerwiseReload


def push_plainly(llm: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load tensors as ``reload_weights`` does: names that vLLM does not know are ignored, and nothing is said."""
    from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]

    reload, model = LayerwiseReload(), served_model(llm)
    with set_current_vllm_config(llm.llm_engine.vllm_config), torch.no_grad():
        reload.initialize(model)
        model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
        reload.finalize(model, llm.llm_engine.model_config)
    llm.reset_prefix_cache()


def forward_once(llm: Any, tokens: Sequence[int]) -> None:
    """One prefill of ``tokens`` with nothing cached before it."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    llm.reset_prefix_cache()
    llm.generate([{"prompt_token_ids": list(tokens)}], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
