"""Records as plain JSON data with the arrays beside it, and back: what ``wire`` carries between an engine's process and
its owner. Every record has its own reader, so nothing but these records can come out of a message."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from lockstep.interfaces import LogProbs
from lockstep.records import (
    Completion,
    DerivedReport,
    GenerateRequest,
    LiveTensor,
    Manifest,
    SamplingParams,
    Sequence,
    TensorSpec,
)

_ARRAY = "@array"

Arrays = list[np.ndarray]


def plain(value: Any, arrays: Arrays) -> Any:
    """``value`` as JSON data: records become tables of their fields; arrays are appended to ``arrays`` and named by
    their place. Raises TypeError for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name), arrays) for one in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, arrays) for item in value]
    raise TypeError(f"a {type(value).__name__} can't travel to an engine's process")


def _restored(data: dict[str, Any], arrays: Seq[np.ndarray]) -> dict[str, Any]:
    """The table with its arrays put back (one level: no record of these nests another with arrays)."""
    return {
        key: arrays[value[_ARRAY]] if isinstance(value, dict) and value.keys() == {_ARRAY} else value
        for key, value in data.items()
    }


def read_request(data: dict[str, Any], arrays: Seq[np.ndarray]) -> GenerateRequest:
    """A ``GenerateRequest`` from its plain form."""
    sampling = dict(data["sampling"])
    for name in ("stop_token_ids", "stop_strings"):
        sampling[name] = tuple(sampling[name])
    return GenerateRequest(**{**_restored(data, arrays), "sampling": SamplingParams(**sampling)})


def read_completion(data: dict[str, Any], arrays: Seq[np.ndarray]) -> Completion:
    """A ``Completion`` from its plain form."""
    return Completion(**_restored(data, arrays))


def read_sequence(data: dict[str, Any], arrays: Seq[np.ndarray]) -> Sequence:
    """A ``Sequence`` from its plain form."""
    return Sequence(**_restored(data, arrays))


def read_logprobs(data: dict[str, Any], arrays: Seq[np.ndarray]) -> LogProbs:
    """``LogProbs`` from their plain form."""
    return LogProbs(**_restored(data, arrays))


def read_manifest(data: dict[str, Any]) -> Manifest:
    """A ``Manifest`` from its plain form."""
    specs = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in data["tensors"])
    return Manifest(**{**data, "tensors": specs})


def read_reports(data: Iterable[dict[str, Any]]) -> tuple[DerivedReport, ...]:
    """``DerivedReport`` s from their plain form."""
    return tuple(DerivedReport(**one) for one in data)


def read_live(data: Iterable[dict[str, Any]]) -> tuple[LiveTensor, ...]:
    """``LiveTensor`` s from their plain form."""
    return tuple(LiveTensor(**{**one, "shape": tuple(one["shape"])}) for one in data)


def tensor_bytes(tensor: torch.Tensor) -> tuple[dict[str, Any], np.ndarray]:
    """Dtype and shape of a tensor, and its bytes as a flat uint8 array (numpy knows no bfloat16 and no float8)."""
    solid = tensor.detach().cpu().contiguous()
    described = {"dtype": str(solid.dtype).removeprefix("torch."), "shape": list(solid.shape)}
    return described, solid.reshape(-1).view(torch.uint8).numpy()


def bytes_tensor(described: dict[str, Any], data: np.ndarray) -> torch.Tensor:
    """The tensor of ``tensor_bytes``. Raises ValueError for a dtype that torch lacks or bytes of another count."""
    dtype = getattr(torch, described["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {described['dtype']!r}")
    return torch.from_numpy(data).view(dtype).view(described["shape"])
