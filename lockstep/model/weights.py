"""A module's weights as a refit sees them: every parameter and policy buffer once, under transformers' names.

Whoever has a loaded model has a ``WeightSource``: our trainer, another's, or a check that trains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from lockstep.records import Manifest, TensorSpec

_GROUPS = (
    # Tensors that engines fuse when they load: a transfer must not split them.
    (re.compile(r"^(.*\.)(?:q|k|v)_proj\.\w+$"), "qkv"),
    (re.compile(r"^(.*\.)(?:q_a_proj|kv_a_proj_with_mqa)\.\w+$"), "qkv_a"),
    (re.compile(r"^(.*\.experts)\..*$"), ""),
    (re.compile(r"^(.*\.)(?:gate|up)_proj\.\w+$"), "gate_up"),
)


def atomic_group(name: str) -> str:
    """The atomic group of a parameter: ``model.layers.0.self_attn.qkv`` for any of q, k, v; its own name if alone."""
    for pattern, suffix in _GROUPS:
        match = pattern.match(name)
        if match:
            return match.group(1) + suffix
    return name


class ModelWeights:
    """Implements ``interfaces.WeightSource`` over one process' module at policy version ``version``.

    The tensors are live: whoever reads them later reads later weights. Persistent buffers are policy state
    (``e_score_correction_bias``, ``tid2eid``) and travel; layout buffers that no checkpoint holds do not. Tied
    tensors travel once, under their first name. Members of an atomic group follow each other.
    """

    def __init__(self, model: torch.nn.Module, version: int) -> None:
        self.version = version
        config: Any = model.config
        self._model_type: str = config.get_text_config().model_type
        self._tensors, self._tied = _named_state(model)

    def manifest(self) -> Manifest:
        """Names, shapes, dtypes, groups in order."""
        return Manifest(version=self.version, tensors=self._specs, tied=dict(self._tied), model_type=self._model_type)

    @cached_property
    def _specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                group=atomic_group(name),
                trainable=tensor.requires_grad,
            )
            for name, tensor in self._tensors.items()
        )

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """(name, global shape, offset, detached live tensor) in the manifest's order; one whole shard each."""
        for name, tensor in self._tensors.items():
            yield name, tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach()


def _named_state(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and persistent buffers by first name, groups together; further names of tied ones."""
    persistent = set(model.state_dict(keep_vars=True))
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    unique: list[tuple[str, torch.Tensor]] = []
    tied: dict[str, str] = {}
    for name, tensor in named:
        if name not in persistent:
            continue
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        unique.append((name, tensor))
    order: dict[str, int] = {}
    for name, _ in unique:
        order.setdefault(atomic_group(name), len(order))
    unique.sort(key=lambda item: order[atomic_group(item[0])])
    return dict(unique), tied
