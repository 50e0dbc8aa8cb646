"""Where two forwards part: every module's output on both sides, in the order of completion, and the first that differs.

Children complete before their parents, so the first differing module is the innermost one: the place of the fault and
not what it spoils afterwards. One forward a side is enough; nothing is searched. The two sides may be any two modules
with the same names inside: a trainer's and an engine's, a refitted engine's and a disk-loaded one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Outputs = Mapping[str, torch.Tensor]
"""Outputs by module name in the order of completion, float32 on the CPU; a second call of a module is ``name@2``."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest difference that rounding makes, as a share of the larger of 1 and the output's largest value."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first module whose output differs: by how much at most, and which share of its values."""

    module: str
    largest: float
    share: float
    detail: str = ""

    def text(self) -> str:
        """In words."""
        if self.detail:
            return f"{self.module}: {self.detail}"
        return f"{self.module}: {100 * self.share:.3g} % of its outputs differ, by {self.largest:.3g} at most"


@contextmanager
def recorded_outputs(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """While the block runs, the tensors out of every named module that has parameters are kept by name."""
    outputs: dict[str, torch.Tensor] = {}
    calls: dict[str, int] = {}
    handles = []
    for name, module in model.named_modules():
        if not name or next(module.parameters(), None) is None:
            continue  # a fault in weights shows first at a module that has some, not at its activation function

        def hook(_module: torch.nn.Module, _inputs: Any, output: Any, name: str = name) -> None:
            tensors = [t.detach().float().cpu().reshape(-1) for t in _tensors(output)]
            if tensors:
                calls[name] = calls.get(name, 0) + 1
                key = name if calls[name] == 1 else f"{name}@{calls[name]}"
                outputs[key] = torch.cat(tensors)  # a copy: modules may write over their outputs

        handles.append(module.register_forward_hook(hook))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def first_difference(ours: Outputs, theirs: Outputs, *, tolerance: float) -> Difference | None:
    """The first output of ``ours`` that ``theirs`` has otherwise; None if all agree within ``tolerance``.

    Raises ValueError if the two sides have no module in common: then nothing was compared.
    """
    if not ours.keys() & theirs.keys():
        raise ValueError(f"no module in common: {list(ours)[:3]} … against {list(theirs)[:3]} …")
    for name, output in ours.items():
        other = theirs.get(name)
        if other is None:
            continue
        if output.shape != other.shape:
            return Difference(name, float("nan"), 1.0, f"{output.numel()} values against {other.numel()}")
        distance = (output - other).abs()
        # −inf on both sides (a mask) is no difference; NaN on one side is.
        distance = torch.where((output == other) | (output.isnan() & other.isnan()), 0.0, distance)
        finite = other[other.isfinite()]
        limit = tolerance * max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
        wrong = ~(distance <= limit)
        if bool(wrong.any()):
            return Difference(name, float(distance.max()), float(wrong.float().mean()))
    return None


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
