"""Which tensors of a checkpoint are quantised, and which scales are theirs: from names, dtypes and shapes.

``X.weight`` with ``X.weight_scale_inv`` (DeepSeek-V3, Qwen3, GLM) or ``X.scale`` (DeepSeek-V4). e4m3 codes are fp8 in
blocks of 128 × 128, bytes (I8, U8) are mxfp4 in blocks of 1 × 32. A scale without codes, and codes without a scale, are
refused: a loader would take either for a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.errors import CheckpointError, Problem, shown
from lockstep.checkpoint.records import CheckpointIndex, TensorEntry
from lockstep.numerics import fp8, mxfp4
from lockstep.numerics.blocks import QuantisationError
from lockstep.numerics.pairs import Format, row_parts
from lockstep.records import Quantisation

METHOD = "lockstep_mxfp4_experts"
"""``quant_method`` of experts in mxfp4 beside plain linears, for which there is no published layout."""

SCALE_ENDINGS = (".weight_scale_inv", ".scale")
FP8_CODES = ("F8_E4M3", "F8_E4M3FNUZ")
PACKED = ("I8", "U8")
_SCALE_DTYPES = {"fp8": ("F32", "BF16"), "fp8_ue8m0": ("F8_E8M0",), "mxfp4": ("F8_E8M0",)}


@dataclass(frozen=True, slots=True)
class Pair:
    """A quantised weight and its block scales."""

    weight: TensorEntry
    scale: TensorEntry
    form: Format


def pairs_of(source: CheckpointIndex) -> tuple[Pair, ...]:
    """All pairs. Raises CheckpointError with every half pair, wrong shape or dtype, and for formats that are none of
    these (by ``quantization_config``)."""
    problems = _unknown_formats(source.config)
    pairs: list[Pair] = []
    scales: set[str] = set()
    for entry in source.tensors.values():
        if entry.dtype not in (*FP8_CODES, *PACKED):
            continue
        scale = _scale_of(source, entry)
        if scale is None:
            text = f"{entry.name} is {entry.dtype} and has no {' or '.join(SCALE_ENDINGS)} beside it"
            problems.append(Problem("half a pair", text))
            continue
        scales.add(scale.name)
        pair = Pair(entry, scale, _form(entry, scale))
        problems += _misfits(pair)
        pairs.append(pair)
    for entry in source.tensors.values():
        looks = entry.name.endswith(".weight_scale_inv") or entry.dtype == "F8_E8M0"
        if looks and entry.name not in scales:
            problems.append(Problem("half a pair", f"{entry.name} has no quantised weight beside it"))
    if problems:
        raise CheckpointError(source.folder, problems)
    return tuple(pairs)


def scheme_of(source: CheckpointIndex) -> Quantisation:
    """How a checkpoint is quantised, in the words of ``rollout.quantisation``. Raises as ``pairs_of``, and for a
    mixture that is none of the schemes."""
    pairs = pairs_of(source)
    forms = {pair.form for pair in pairs}
    if any(pair.weight.dtype == "F8_E4M3FNUZ" for pair in pairs):
        return "fp8" if forms == {"fp8"} else "fp8_ue8m0"
    if not forms:
        return "none"
    if "mxfp4" in forms and "fp8" not in forms:
        return "mxfp4_experts"
    if len(forms) == 1:
        return "fp8" if "fp8" in forms else "fp8_ue8m0"
    raise CheckpointError(source.folder, [f"its weights are quantised in a mixture that is no scheme: {sorted(forms)}"])


def is_fnuz(source: CheckpointIndex) -> bool:
    """Whether any codes are e4m3fnuz (MI300): the same bits mean half there, so that they are never passed through."""
    return any(entry.dtype == "F8_E4M3FNUZ" for entry in source.tensors.values())


def _scale_of(source: CheckpointIndex, entry: TensorEntry) -> TensorEntry | None:
    stem = entry.name.removesuffix(".weight")
    found = [source.tensors[stem + ending] for ending in SCALE_ENDINGS if stem + ending in source.tensors]
    return found[0] if len(found) == 1 else None


def _form(entry: TensorEntry, scale: TensorEntry) -> Format:
    if entry.dtype in PACKED:
        return "mxfp4"
    return "fp8_ue8m0" if scale.dtype == "F8_E8M0" else "fp8"


def _misfits(pair: Pair) -> list[Problem]:
    weight, scale = pair.weight, pair.scale
    problems: list[Problem] = []
    if scale.dtype not in _SCALE_DTYPES[pair.form]:
        allowed = " or ".join(_SCALE_DTYPES[pair.form])
        problems.append(Problem("scale of a wrong dtype", f"{scale.name} is {scale.dtype}, expected {allowed}"))
    try:
        if pair.form == "mxfp4":
            expected = mxfp4.scale_shape((*weight.shape[:-1], 2 * weight.shape[-1]))
        else:
            expected = fp8.scale_shape(weight.shape, row_parts(weight.name))
    except (QuantisationError, IndexError) as error:
        return [*problems, Problem("codes without blocks", f"{weight.name}: {error}")]
    if scale.shape != expected:
        text = f"{scale.name} has shape {scale.shape}, {weight.name} needs {expected}"
        problems.append(Problem("scale of a wrong shape", text))
    return problems


def _unknown_formats(config: Mapping[str, Any]) -> list[Problem]:
    """What ``quantization_config`` says beyond the formats known here."""
    section = config.get("quantization_config")
    if section is None:
        return []
    if not isinstance(section, Mapping):
        return [Problem("unknown quantisation", f"quantization_config is {shown(section)}, expected an object")]
    problems: list[Problem] = []
    method = section.get("quant_method")
    if method not in ("fp8", METHOD):
        text = f"quant_method {shown(method)}; fp8 in blocks of 128 × 128 and mxfp4 experts are known"
        problems.append(Problem("unknown quantisation", text))
    blocks = section.get("weight_block_size")
    if method == "fp8" and blocks != [128, 128]:
        problems.append(Problem("unknown quantisation", f"weight_block_size {shown(blocks)}; [128, 128] is known"))
    if method == "fp8" and section.get("activation_scheme", "dynamic") != "dynamic":
        text = f"activation_scheme {shown(section['activation_scheme'])}: static scales of activations are not known"
        problems.append(Problem("unknown quantisation", text))
    return problems
