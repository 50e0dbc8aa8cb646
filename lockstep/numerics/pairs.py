"""Quantised tensors in a manifest: which belong together, what they are when they are dequantised.

A quantised weight travels as two tensors of one atomic group: its codes under its own name, and its block scales under
the name in ``TensorSpec.scale``. The codes' dtype tells the format: float8_e4m3fn is fp8, uint8 is mxfp4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from lockstep.numerics import fp8, mxfp4
from lockstep.numerics.blocks import QuantisationError, Quantised
from lockstep.records import Manifest, TensorSpec

Format = Literal["fp8", "fp8_ue8m0", "mxfp4"]

_FP8, _MXFP4, _E8M0 = "float8_e4m3fn", "uint8", "float8_e8m0fnu"
_SCALE_DTYPES = {_FP8: ("float32", _E8M0), _MXFP4: (_E8M0,)}


def row_parts(name: str) -> int:
    """How many weights a tensor of this name has stacked in its rows: gate and up in one stack get blocks of their own,
    so that they have the same codes as in a checkpoint that keeps them apart."""
    return 2 if name.removesuffix(".weight").endswith("gate_up_proj") else 1


def quantise(tensor: torch.Tensor, form: Format, name: str) -> Quantised:
    """``tensor`` in ``form``, as a weight called ``name`` travels. Raises QuantisationError."""
    if form == "mxfp4":
        return mxfp4.quantise_mxfp4(tensor, name)
    scale_format = "ue8m0" if form == "fp8_ue8m0" else "float32"
    return fp8.quantise_fp8(tensor, scale_format, row_parts=row_parts(name), name=name)


def quantised_specs(spec: TensorSpec, form: Format, scale_name: str) -> tuple[TensorSpec, TensorSpec]:
    """The two tensors that travel for ``spec``: codes and block scales. Raises QuantisationError if its shape has no
    blocks."""
    try:
        if form == "mxfp4":
            shape, scales, dtype = mxfp4.packed_shape(spec.shape), mxfp4.scale_shape(spec.shape), _MXFP4
        else:
            shape, scales, dtype = spec.shape, fp8.scale_shape(spec.shape, row_parts(spec.name)), _FP8
    except QuantisationError as error:
        raise QuantisationError(f"{spec.name} can't be {form}: {error}") from None
    scale_dtype = "float32" if form == "fp8" else _E8M0
    return (
        replace(spec, shape=shape, dtype=dtype, scale=scale_name),
        replace(spec, name=scale_name, shape=scales, dtype=scale_dtype),
    )


def dequantise(spec: TensorSpec, quantised: Quantised, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight of a quantised ``spec``. Raises QuantisationError for codes or scales that are unusable."""
    if spec.dtype == _MXFP4:
        return mxfp4.dequantise_mxfp4(quantised, dtype, spec.name)
    return fp8.dequantise_fp8(quantised, dtype, row_parts=row_parts(spec.name), name=spec.name)


def plain_manifest(manifest: Manifest) -> Manifest:
    """The manifest of the dequantised weights, in float32.

    Raises QuantisationError with every half pair, every scale of the wrong shape, dtype or group, by name.
    """
    specs = {spec.name: spec for spec in manifest.tensors}
    scales = {spec.scale: spec.name for spec in manifest.tensors if spec.scale}
    problems: list[str] = []
    plain: list[TensorSpec] = []
    for spec in manifest.tensors:
        if spec.name in scales:
            continue
        if spec.scale:
            problems += _misfits(spec, specs.get(spec.scale))
            shape = (*spec.shape[:-1], 2 * spec.shape[-1]) if spec.dtype == _MXFP4 else spec.shape
            plain.append(replace(spec, shape=shape, dtype="float32", scale=""))
        elif spec.dtype == _FP8:
            problems.append(f"half a pair: {spec.name} is {spec.dtype} and names no block scales")
        elif spec.dtype == _E8M0 or spec.name.endswith("_scale_inv"):
            problems.append(f"half a pair: the block scales {spec.name} travel without their weight")
        else:
            plain.append(spec)
    if problems:
        raise QuantisationError(
            f"manifest of version {manifest.version} ({manifest.quantisation}), {len(problems)} problem(s): "
            + "; ".join(problems)
        )
    return replace(manifest, tensors=tuple(plain), quantisation="none")


def _misfits(spec: TensorSpec, scale: TensorSpec | None) -> list[str]:
    """What is wrong with a quantised tensor and its scales."""
    if spec.dtype not in _SCALE_DTYPES:
        return [f"dtype: {spec.name} is {spec.dtype} and has block scales; {_FP8} or {_MXFP4} codes are right"]
    if scale is None:
        return [f"half a pair: {spec.name} travels without its block scales {spec.scale}"]
    problems: list[str] = []
    if scale.dtype not in _SCALE_DTYPES[spec.dtype]:
        allowed = " or ".join(_SCALE_DTYPES[spec.dtype])
        problems.append(f"dtype: the block scales {scale.name} are {scale.dtype}, expected {allowed}")
    try:
        if spec.dtype == _MXFP4:
            expected = mxfp4.scale_shape((*spec.shape[:-1], 2 * spec.shape[-1]))
        else:
            expected = fp8.scale_shape(spec.shape, row_parts(spec.name))
    except QuantisationError as error:
        return [*problems, f"shape: {spec.name}: {error}"]
    if scale.shape != expected:
        problems.append(f"shape: the block scales {scale.name} are {scale.shape}, {spec.name} needs {expected}")
    if scale.group != spec.group:
        problems.append(f"group: {spec.name} is of {spec.group}, its block scales of {scale.group}")
    return problems
