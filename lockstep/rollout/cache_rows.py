"""Taking rows out of transformers' caches and joining them, for every kind of cache whose rows are known to be apart.

A ``DynamicCache`` holds one layer object per decoder layer; each keeps its tensors with the batch in front, as plain
attributes or inside dicts. ``rows_of`` copies chosen rows (repeats allowed) into a new cache, so the original can be
used again. A kind of layer that isn't listed here is never batched: ``is_batchable`` says so, and such caches are
copied whole, one sequence each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

_BATCH_FIRST_LAYERS = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DeepseekV4HCACache",
        "DeepseekV4CSACache",
    }
)


def is_batchable(cache: Any) -> bool:
    """Whether every layer of ``cache`` is of a kind whose tensors all carry the batch in front."""
    return all(type(layer).__name__ in _BATCH_FIRST_LAYERS for layer in cache.layers)


def rows_of(cache: Any, rows: Sequence[int]) -> Any:
    """A new cache with the given rows of ``cache``, in order; rows may repeat. One that isn't batchable is copied
    whole, and only row 0 may be asked for."""
    if not is_batchable(cache):
        if list(rows) != [0]:
            raise ValueError(f"this kind of cache holds one sequence; rows {list(rows)} were asked for")
        return copy.deepcopy(cache)
    index = torch.tensor(list(rows))
    return _rebuilt([cache], lambda tensors: tensors[0].index_select(0, index.to(tensors[0].device)))


def joined(caches: Sequence[Any]) -> Any:
    """One cache with the rows of all ``caches``, which must be batchable and of equal length."""
    return _rebuilt(caches, lambda tensors: torch.cat(list(tensors), dim=0))


def _rebuilt(caches: Sequence[Any], combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Any:
    result = copy.copy(caches[0])
    result.layers = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layer = copy.copy(layers[0])
        for name in vars(layer):
            setattr(layer, name, _combined([vars(one)[name] for one in layers], combine))
        result.layers.append(layer)
    return result


def _combined(values: Sequence[Any], combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        # Scalars (a window's size) are settings, an empty vector is transformers' placeholder: no rows in either.
        return combine(values) if first.ndim >= 2 else first
    if isinstance(first, dict):
        return {key: _combined([value[key] for value in values], combine) for key in first}
    if any(value != first for value in values):
        raise ValueError(f"caches of different state can't share a batch: {list(values)}")
    return first
