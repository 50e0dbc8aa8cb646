"""The ``quantization_config`` of a model's ``config.json``: how loaders know which tensors are quantised, and how.

The same table that quantises (``quantised_names.py``) says what stays as it is, so that a file and what is sent under
its names can't disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lockstep.numerics.blocks import QuantisationError
from lockstep.records import Manifest, Quantisation
from lockstep.refit.quantised_names import check_scheme, family, form_of

BLOCK = (128, 128)
"""Rows and columns that share one scale in fp8 (deepseek-ai/DeepSeek-V3, ``weight_block_size``)."""


def fp8_section(scheme: Quantisation, kept: Iterable[str]) -> dict[str, Any]:
    """The section of fp8 linears and experts (``scheme`` "fp8", "fp8_ue8m0"). ``kept``: modules, by their paths in
    checkpoint names, whose weights stay in the model's dtype."""
    section: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": sorted(kept),
    }
    return section | ({"scale_fmt": "ue8m0"} if scheme == "fp8_ue8m0" else {})


def served_section(manifest: Manifest, scheme: Quantisation) -> dict[str, Any] | None:
    """The section for an engine that is to serve the weights of ``manifest`` (plain, in checkpoint names) quantised by
    ``scheme``; None for "none".

    Raises QuantisationError for a scheme other than fp8, for a model type without a quantised form, and for a name that
    its table does not know.
    """
    if scheme == "none":
        return None
    check_scheme(manifest.model_type, scheme)
    if scheme not in ("fp8", "fp8_ue8m0") or family(manifest.model_type).checkpoint_scale[0]:
        raise QuantisationError(f"{scheme} weights of {manifest.model_type} have no section that loaders agree on")
    kept = [
        spec.name.removesuffix(".weight")
        for spec in manifest.tensors
        if len(spec.shape) == 2
        and spec.name.endswith(".weight")
        and form_of(manifest.model_type, scheme, spec.name) is None
    ]
    return fp8_section(scheme, kept)
