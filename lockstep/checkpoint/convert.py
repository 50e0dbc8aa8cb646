"""Quantise and dequantise a checkpoint: the tables and the arithmetic are those of a quantised refit.

What is quantised is ``refit.quantised_names``' business, how is ``numerics``': an engine that loads a prepared folder
and one that is refitted from the trainer therefore hold the same bytes. Only names of published checkpoints are known
here (one tensor an expert); a name that the family's table does not know is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.errors import CheckpointError, Problem
from lockstep.checkpoint.pairs_on_disk import METHOD, Pair, pairs_of, scheme_of
from lockstep.checkpoint.records import CheckpointIndex, OutputGroup, OutputTensor, TensorEntry
from lockstep.numerics.blocks import QuantisationError, Quantised
from lockstep.numerics.pairs import Format, dequantise, quantise, quantised_specs
from lockstep.records import Quantisation, TensorSpec
from lockstep.refit.quantised_names import check_scheme, family, form_of, scale_name

if TYPE_CHECKING:
    import torch

_WIDE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_WORDS = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "float32": "F32", "uint8": "U8"}
_PACKED_WORDS = {"deepseek_v4": "I8"}
"""DeepSeek-V4 publishes packed e2m1 codes as I8; the bytes are the same."""


def model_type_of(config: Mapping[str, Any]) -> str:
    """The ``model_type`` by which the tables know a checkpoint: that of its language model."""
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    outer = str(config.get("model_type", ""))
    return str(inner) if inner else {"inkling_mm_model": "inkling_text"}.get(outer, outer)


def verbatim(entry: TensorEntry) -> OutputGroup:
    """A tensor that stays as it is."""
    return OutputGroup((OutputTensor(entry.name, entry.dtype, entry.shape, (entry.name,), verbatim=True),))


@dataclass(frozen=True)
class Quantise:
    """The stage that makes an engine's checkpoint: ``scheme`` as in ``rollout.quantisation``. ``high_precision``:
    patterns (``re.search``) of further names that stay as they are."""

    scheme: Quantisation
    high_precision: tuple[str, ...] = ()
    name: str = field(default="quantise", init=False)

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the result depends on."""
        return {"scheme": self.scheme, "high_precision": list(self.high_precision)}

    def outputs(self, source: CheckpointIndex) -> Sequence[OutputGroup]:
        """A weight with its scales for each that is quantised; the others verbatim. Raises CheckpointError for a source
        that is quantised already, an unknown family or name, and weights that have no such form, all at once."""
        model_type = model_type_of(source.config)
        already = scheme_of(source)
        if already != "none":
            way_out = "dequantise it first" if already != self.scheme else "it can be served as it is"
            raise CheckpointError(source.folder, [f"is quantised already ({already}): {way_out}"])
        try:
            check_scheme(model_type, self.scheme)
        except QuantisationError as error:
            raise CheckpointError(source.folder, [str(error)]) from error
        problems: list[Problem] = []
        if self.high_precision and model_type == "deepseek_v4":
            text = "DeepSeek-V4's configuration has no list of modules that stay as they are: no loader would take them"
            problems.append(Problem("prepare.high_precision", f"{text}; remove it"))
        groups: list[OutputGroup] = []
        for entry in source.tensors.values():
            try:
                groups.append(self._group(model_type, entry))
            except QuantisationError as error:
                problems.append(Problem("tensor that can't be quantised", str(error)))
        if not problems and all(group.tensors[0].verbatim for group in groups):
            problems.append(Problem("nothing to quantise", f"{self.scheme} applies to no tensor of this checkpoint"))
        if problems:
            raise CheckpointError(source.folder, problems)
        return groups

    def make(self, group: OutputGroup, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Codes and scales of one weight. Raises CheckpointError, with its name, for one that is not finite."""
        import torch

        codes, scale = group.tensors
        form: Format = "mxfp4" if codes.dtype in ("U8", "I8") else "fp8" if scale.dtype == "F32" else "fp8_ue8m0"
        try:
            pair = quantise(read(codes.name), form, codes.name)
        except QuantisationError as error:
            raise CheckpointError(self.name, [Problem("tensor that can't be quantised", str(error))]) from error
        values = pair.values.view(torch.int8) if codes.dtype == "I8" else pair.values
        return {codes.name: values, scale.name: pair.scale}

    def config(self, source: CheckpointIndex) -> dict[str, Any]:
        """With the ``quantization_config`` by which loaders know the format."""
        model_type = model_type_of(source.config)
        kept = [
            group.tensors[0].name.removesuffix(".weight")
            for group in self.outputs(source)
            if group.tensors[0].verbatim and group.tensors[0].name.endswith(".weight")
        ]
        experts_apart = self.scheme == "mxfp4_experts"
        linears = family(model_type).beside_mxfp4 if experts_apart else self.scheme
        section: dict[str, Any] = {"quant_method": METHOD if experts_apart and linears is None else "fp8"}
        if linears is not None:
            section |= {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        if linears == "fp8_ue8m0":
            section["scale_fmt"] = "ue8m0"
        if model_type != "deepseek_v4":  # whose published file has no such list
            section["modules_to_not_convert"] = sorted(kept)
        config = {**source.config, "quantization_config": section}
        if model_type == "deepseek_v4":
            config["expert_dtype"] = "fp4" if experts_apart else "fp8"
        return config

    def _group(self, model_type: str, entry: TensorEntry) -> OutputGroup:
        form = form_of(model_type, self.scheme, entry.name)
        if form is None or any(re.search(pattern, entry.name) for pattern in self.high_precision):
            return verbatim(entry)
        if entry.dtype not in _WIDE:
            raise QuantisationError(f"{entry.name} is {entry.dtype}; {', '.join(_WIDE)} can be quantised")
        spec = TensorSpec(entry.name, entry.shape, _WIDE[entry.dtype], entry.name)
        specs = quantised_specs(spec, form, scale_name(model_type, "checkpoint", entry.name))
        packed = _PACKED_WORDS.get(model_type, "U8")
        words = [packed if spec.dtype == "uint8" else _WORDS[spec.dtype] for spec in specs]
        return OutputGroup(
            tuple(
                OutputTensor(spec.name, word, spec.shape, (entry.name,))
                for spec, word in zip(specs, words, strict=True)
            )
        )


@dataclass(frozen=True)
class Dequantise:
    """The stage that makes a trainer's checkpoint of a quantised one: code · scale, rounded once to bfloat16."""

    name: str = field(default="dequantise", init=False)

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the result depends on."""
        return {"dtype": "bfloat16"}

    def outputs(self, source: CheckpointIndex) -> Sequence[OutputGroup]:
        """One bfloat16 tensor for each pair, everything else verbatim. Raises CheckpointError for half pairs, unknown
        formats, and a source that has nothing to dequantise."""
        pairs = pairs_of(source)
        if not pairs:
            raise CheckpointError(source.folder, ["has no quantised tensor: there is nothing to dequantise"])
        by_weight = {pair.weight.name: pair for pair in pairs}
        scales = {pair.scale.name for pair in pairs}
        return [
            _plain_group(by_weight[entry.name]) if entry.name in by_weight else verbatim(entry)
            for entry in source.tensors.values()
            if entry.name not in scales
        ]

    def make(self, group: OutputGroup, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weight. Raises CheckpointError, with its name, for codes or scales that are NaN or unusable."""
        import torch

        (plain,) = group.tensors
        codes, scale = (read(name) for name in plain.sources)
        packed = codes.dtype in (torch.int8, torch.uint8)
        values = codes.view(torch.uint8) if packed else codes
        if scale.dtype == torch.bfloat16:  # some repackages store the same scales rounded
            scale = scale.to(torch.float32)
        spec = TensorSpec(plain.name, tuple(codes.shape), "uint8" if packed else "float8_e4m3fn", plain.name)
        try:
            result = dequantise(spec, Quantised(values, scale), torch.bfloat16)
        except QuantisationError as error:
            raise CheckpointError(self.name, [Problem("tensor that can't be dequantised", str(error))]) from error
        return {plain.name: result}

    def config(self, source: CheckpointIndex) -> dict[str, Any]:
        """Without what speaks of quantisation."""
        return {
            key: value for key, value in source.config.items() if key not in ("quantization_config", "expert_dtype")
        }


def _plain_group(pair: Pair) -> OutputGroup:
    shape = pair.weight.shape
    if pair.form == "mxfp4":
        shape = (*shape[:-1], 2 * shape[-1])
    return OutputGroup((OutputTensor(pair.weight.name, "BF16", shape, (pair.weight.name, pair.scale.name)),))
