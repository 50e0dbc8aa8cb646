"""Looking around in a vLLM engine: its modules, its drafter, its platform. vLLM is imported when it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lockstep.rollout.vllm_hooks import model_runner, served_model


def modules(engine: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """(path, module) of the served model and, under ``drafter.``, of its drafter."""
    model = engine if isinstance(engine, torch.nn.Module) else served_model(engine)
    yield from model.named_modules()
    if (drafter := drafter_model(engine)) is not None:
        yield from ((f"drafter.{path}", module) for path, module in drafter.named_modules())


def drafter_model(engine: Any) -> torch.nn.Module | None:
    """The speculative drafter's module, if the engine has one with weights."""
    if isinstance(engine, torch.nn.Module):
        return None
    drafter = getattr(model_runner(engine), "drafter", None)
    model = getattr(drafter, "model", None)
    return model if isinstance(model, torch.nn.Module) else None


def platform() -> str:
    """vLLM's word for what it computes on: cpu, cuda, rocm, …"""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    return "rocm" if current_platform.is_rocm() else str(current_platform.device_type)


def on_cpu(engine: Any) -> bool:
    """Whether this vLLM computes on a CPU."""
    return platform() == "cpu"
