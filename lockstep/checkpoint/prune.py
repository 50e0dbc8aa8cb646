"""A copy of a checkpoint with fewer layers: for smoke tests of large models on one node. It produces no sensible text.

Layers keep their order and are numbered anew; tensors are copied byte for byte. What ``config.json`` says of each layer
follows (``prune_config.py``). Layers for speculative decoding (MTP) are dropped or kept as a whole: GLM-5 stores them
as the layers behind the last, DeepSeek-V4 and Inkling apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep.checkpoint.errors import CheckpointError, Problem, shown
from lockstep.checkpoint.prune_config import MAX_LAYERS, LayerMap, layer_map, pruned_config
from lockstep.checkpoint.records import CheckpointIndex, OutputGroup, OutputTensor, TensorEntry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Prune:
    """Keep some layers: the first ``layers``, or those that are listed, in ascending order.

    Example: ``Prune(5)`` of GLM-5.2 keeps its 3 dense layers and 2 of its MoE layers, and drops its MTP layer.
    """

    layers: int | Sequence[int]
    mtp: Literal["drop", "keep"] = "drop"

    @property
    def name(self) -> str:
        """The stage."""
        return "prune"

    @property
    def settings(self) -> Mapping[str, Any]:
        """Which layers, and what becomes of the MTP layers."""
        return {"layers": self.layers if isinstance(self.layers, int) else list(self.layers), "mtp": self.mtp}

    def config(self, source: CheckpointIndex) -> dict[str, Any]:
        """The configuration of what is left. Raises CheckpointError with every reason for a refusal."""
        return self._checked(source)[1]

    def outputs(self, source: CheckpointIndex) -> Sequence[OutputGroup]:
        """Every tensor that is left, copied, in the order of the source."""
        layers, _, _ = self._checked(source)
        names = {name: layers.renamed(name) for name in source.tensors}
        return [OutputGroup((_copied(source.tensors[old], new),)) for old, new in names.items() if new is not None]

    def make(self, group: OutputGroup, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors themselves."""
        return {tensor.name: read(tensor.sources[0]) for tensor in group.tensors}

    def _checked(self, source: CheckpointIndex) -> tuple[LayerMap, dict[str, Any], list[Problem]]:
        problems: list[Problem] = []
        keep = tuple(range(min(self.layers, MAX_LAYERS + 1))) if isinstance(self.layers, int) else tuple(self.layers)
        layers = layer_map(source.config, keep, keep_mtp=self.mtp == "keep", problems=problems)
        if layers is None:
            raise CheckpointError(f"{source.folder} can't be pruned", problems)
        config = pruned_config(source.config, layers, problems)
        problems += _unlayered(source, layers)
        if problems:
            raise CheckpointError(f"{source.folder} can't be pruned", problems)
        return layers, config, problems


def _copied(entry: TensorEntry, name: str) -> OutputTensor:
    return OutputTensor(name, entry.dtype, entry.shape, (entry.name,), verbatim=True)


def _unlayered(source: CheckpointIndex, layers: LayerMap) -> list[Problem]:
    """Tensors that contradict the number of layers, and layers that have no tensors."""
    numbers = {name: layers.number(name) for name in source.tensors}
    problems = [
        Problem("tensor of no layer", f"{shown(name)}: config.json has {layers.num_layers} layers")
        for name, number in numbers.items()
        if number is not None and number >= layers.num_layers + layers.num_behind
    ]
    present = set(numbers.values())
    problems += [
        Problem("layer without tensors", f"no tensor is called {layers.family.prefix}{layer}.…")
        for layer in layers.keep
        if layer not in present
    ]
    stray = re.compile(r"(^|\.)layers\.\d+\.")
    problems += [
        Problem("tensor of an unknown layout", f"{shown(name)} is no {layers.family.prefix}N.…")
        for name, number in numbers.items()
        if number is None and stray.search(name) and not layers.is_apart(name)
    ]
    if not layers.is_prefix and (source.folder / "hf_quant_config.json").exists():
        text = "hf_quant_config.json names layers, and only the first ones can be kept under their numbers"
        problems.append(Problem("refused", f"{text}: keep the first layers"))
    return problems
