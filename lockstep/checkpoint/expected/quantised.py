"""What expected weights become in a quantised checkpoint: packed or fp8 weights, and block scales beside them.

``config.json`` says how (``quantization_config``, ``expert_dtype``, ``modules_to_not_convert``); what it leaves open
(the name and dtype of scales, which two publishers of one model chose differently) is read off the first tensor, and
all others must follow it.

| checkpoint | linears | experts |
|---|---|---|
| GLM-5.2-FP8, Qwen3-…-FP8 | F8_E4M3 128 × 128, F32 ``X.weight_scale_inv`` | same |
| DeepSeek-V4-Flash, -Pro | F8_E4M3 128 × 128, F8_E8M0 ``X.scale`` | I8: 2 e2m1 codes; F8_E8M0 ``X.scale`` of 1 × 32 |
| DeepSeek-V4-Flash, repackaged | F8_E4M3 128 × 128, F32 ``X.weight_scale_inv`` | same |

Some repackages store float32 scales rounded to BF16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lockstep.checkpoint.errors import Problem, shown
from lockstep.checkpoint.expected.rows import Expected, Part, Reader
from lockstep.checkpoint.records import TensorEntry

Form = Literal["plain", "fp8", "fp4"]

FP4_BLOCK = 32
MXFP4_EXPERTS = "lockstep_mxfp4_experts"
"""``quant_method`` of experts in mxfp4 beside plain linears, for which no published checkpoint has a word."""
_MODEL_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_CODES = {"e4m3": "F8_E4M3", "e4m3fnuz": "F8_E4M3FNUZ"}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it must lie in the files. ``shape`` None: not known. ``scale_of``: the weight whose scales it holds;
    ``form``: how it is coded."""

    name: str
    shape: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    part: Part
    form: Form = "plain"
    scale_of: str = ""
    ids: bool = False


@dataclass(frozen=True, slots=True)
class Scheme:
    """A checkpoint's quantisation: the forms of linears and experts, blocks, and what scales are called and made of."""

    linears: Form = "plain"
    experts: Form = "plain"
    model_dtype: str = "BF16"
    code_dtype: str = "F8_E4M3"
    block: tuple[int, int] = (128, 128)
    scale_suffix: str = ".weight_scale_inv"
    fp8_scale_dtype: str = "F32"
    packed_dtype: str = "I8"
    excluded: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """In the words of recipes: none, fp8, fp8_ue8m0, mxfp4_experts."""
        if self.experts == "fp4":
            return "mxfp4_experts"
        if self.linears == "plain":
            return "none"
        return "fp8_ue8m0" if self.fp8_scale_dtype == "F8_E8M0" else "fp8"

    def form(self, tensor: Expected) -> Form:
        """How an expected tensor is stored."""
        module = tensor.name.removesuffix(".weight")
        if tensor.role not in ("linear", "expert") or self._is_excluded(module):
            return "plain"
        return self.experts if tensor.role == "expert" else self.linears

    def _is_excluded(self, module: str) -> bool:
        """Whether the module, or one that it lies in, is listed: GLM-5.2-FP8 lists 541."""
        while self.excluded and module:
            if module in self.excluded:
                return True
            module = module.rpartition(".")[0]
        return False


def read_scheme(
    config: Mapping[str, Any],
    expected: Mapping[str, Expected],
    tensors: Mapping[str, TensorEntry],
    problems: list[Problem],
) -> Scheme:
    """The scheme that ``config.json`` states, its open questions answered by the tensors that are there."""
    read = Reader(config, problems)
    model_dtype = _model_dtype(read, expected, tensors)
    if not read.has("quantization_config"):
        return Scheme(model_dtype=model_dtype)
    section = read.section("quantization_config")
    method, fmt = section.config.get("quant_method"), section.config.get("fmt", "e4m3")
    if method not in ("fp8", MXFP4_EXPERTS):
        section.refuse("quant_method", f"{shown(method)} is not known here; fp8 in blocks is")
        return Scheme(model_dtype=model_dtype)
    packed_alone = method == MXFP4_EXPERTS
    if not isinstance(fmt, str) or fmt not in _CODES:
        section.refuse("fmt", f"{shown(fmt)} is none of {', '.join(_CODES)}")
        fmt = "e4m3"
    suffix = _scale_suffix(expected, tensors)
    experts = _experts_form(read, section, expected, tensors)
    scheme = Scheme(
        linears="plain" if packed_alone else "fp8",
        experts="fp4" if packed_alone else experts,
        model_dtype=model_dtype,
        code_dtype=_CODES[fmt],
        block=_block(section),
        scale_suffix=suffix,
        excluded=frozenset(_names(section, "modules_to_not_convert") + _names(section, "ignored_layers")),
    )
    if section.config.get("scale_fmt") not in (None, "ue8m0"):
        section.refuse("scale_fmt", f"{shown(section.config['scale_fmt'])} is not known here; ue8m0 is")
    scales = (scale_name(scheme, name) for name, tensor in expected.items() if scheme.form(tensor) == "fp8")
    packed = (name for name, tensor in expected.items() if scheme.form(tensor) == "fp4")
    return replace(
        scheme,
        fp8_scale_dtype=_first_dtype(scales, tensors, ("F32", "F8_E8M0", "BF16")),
        packed_dtype=_first_dtype(packed, tensors, ("I8", "U8")),
    )


def _model_dtype(read: Reader, expected: Mapping[str, Expected], tensors: Mapping[str, TensorEntry]) -> str:
    """The dtype of unquantised weights: stated at the top or under ``text_config``, else the first weight's."""
    text = read.config.get("text_config")
    for place in (read.config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            stated = place.get(key)
            if stated is None:
                continue
            if isinstance(stated, str) and stated in _MODEL_DTYPES:
                return _MODEL_DTYPES[stated]
            read.refuse(key, f"{shown(stated)} is none of {', '.join(_MODEL_DTYPES)}")
    return _first_dtype(expected, tensors, tuple(_MODEL_DTYPES.values()))


def _scale_suffix(expected: Mapping[str, Expected], tensors: Mapping[str, TensorEntry]) -> str:
    """``.scale`` or ``.weight_scale_inv``, whichever the first quantisable weight has beside it."""
    for name, tensor in expected.items():
        if tensor.role in ("linear", "expert"):
            for suffix in (".scale", ".weight_scale_inv"):
                if name.removesuffix(".weight") + suffix in tensors:
                    return suffix
    return ".weight_scale_inv"


def _experts_form(
    read: Reader, section: Reader, expected: Mapping[str, Expected], tensors: Mapping[str, TensorEntry]
) -> Form:
    stated = read.config.get("expert_dtype", section.config.get("expert_dtype"))
    if stated in ("fp4", "fp8"):
        return stated
    if stated is not None:
        read.refuse("expert_dtype", f"{shown(stated)} is none of fp4, fp8")
    experts = [name for name, tensor in expected.items() if tensor.role == "expert"]
    found = _first_dtype(experts, tensors, ("F8_E4M3", "F8_E4M3FNUZ", "I8", "U8"))
    return "fp4" if found in ("I8", "U8") else "fp8"


def _first_dtype(names: Iterable[str], tensors: Mapping[str, TensorEntry], allowed: tuple[str, ...]) -> str:
    """The dtype of the first of these tensors that is there with an allowed one; the first allowed one if none is."""
    return next((tensors[n].dtype for n in names if n in tensors and tensors[n].dtype in allowed), allowed[0])


def _block(section: Reader) -> tuple[int, int]:
    value = section.config.get("weight_block_size", [128, 128])
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and 0 < size < 1 << 16 for size in value):
        return (value[0], value[1])
    section.refuse("weight_block_size", f"{shown(value)} is no pair of rows and columns")
    return (128, 128)


def _names(section: Reader, key: str) -> tuple[str, ...]:
    value = section.config.get(key) or []
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    section.refuse(key, "must be a list of module names")
    return ()


def scale_name(scheme: Scheme, weight: str) -> str:
    """The name of a weight's block scales."""
    return weight.removesuffix(".weight") + scheme.scale_suffix


def stored(scheme: Scheme, tensor: Expected) -> list[Stored]:
    """The tensors that must lie in the files for an expected one: itself, and its scales if it is quantised."""
    form, shape, part = scheme.form(tensor), tensor.shape, tensor.part
    if tensor.role == "ids":
        return [Stored(tensor.name, shape, ("I64", "I32"), part, ids=True)]
    if form == "plain" or shape is None:
        precise = ("F32",) if tensor.role == "kept" and scheme.model_dtype != "F32" else ()
        return [Stored(tensor.name, shape, (scheme.model_dtype, *precise), part)]
    scale = scale_name(scheme, tensor.name)
    if form == "fp8":
        rows, columns = -(-shape[-2] // scheme.block[0]), -(-shape[-1] // scheme.block[1])
        return [
            Stored(tensor.name, shape, (scheme.code_dtype,), part, "fp8"),
            Stored(scale, (*shape[:-2], rows, columns), (scheme.fp8_scale_dtype,), part, "fp8", tensor.name),
        ]
    return [
        Stored(tensor.name, (*shape[:-1], shape[-1] // 2), (scheme.packed_dtype,), part, "fp4"),
        Stored(scale, (*shape[:-1], -(-shape[-1] // FP4_BLOCK)), ("F8_E8M0",), part, "fp4", tensor.name),
    ]
