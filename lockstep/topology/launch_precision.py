"""In how many bits a checkpoint's weights are: by its ``config.json`` where that says so, else by its name.

config.json  quantization_config ─┐
the path's words (fp8, int4, awq) ─┴─► what the plan counts, and what it had to assume
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from lockstep.topology.catalogue import published_precision

Quantisation = Literal["none", "fp8", "fp8_ue8m0", "mxfp4_experts", "int4"]

Read = tuple[Quantisation, tuple[str, ...]]
"""A precision, and what was assumed about it."""

_FOUR_BITS = "are counted at four bits and a scale for 32"


def precision_by_name(path: str) -> Read | None:
    """The precision of a checkpoint's weights by its name; None where that says nothing."""
    name = path.lower()
    if "fp8" in name:
        return "fp8", ()
    if "mxfp4" in name:
        return "mxfp4_experts", ("mxfp4 weights: experts alone are in four bits",)
    if match := re.search(r"int4|w4a\d+|awq|gptq|nvfp4", name):
        return "int4", (f"{match.group()} weights {_FOUR_BITS}",)
    return ("none", ()) if re.search(r"bf16|fp16|bfloat16", name) else None


_REPOSITORIES: tuple[tuple[str, Quantisation], ...] = (
    (r"deepseek-v3\.[12]", "fp8_ue8m0"),
    (r"deepseek-(v3|r1)(-0324|-0528|-base|-zero)?$", "fp8"),
    (r"kimi-k2(-thinking|\.5)", "int4"),
    (r"kimi-k2(-instruct|-base)", "fp8"),
    (r"gpt-oss-", "mxfp4_experts"),
    (r"minimax-m2", "fp8"),
)
"""Public repositories whose weights are quantised and whose names don't say so, by their config.json."""


def published(path: str, name: str | None = None) -> Read:
    """The precision of a model whose path says nothing of it: its repository's, which is told. ``name``: the model of
    the catalogue that it is."""
    last = path.rstrip("/").rpartition("/")[2].lower()
    stated: Quantisation | None = published_precision(name, base="base" in last) if name else None
    if stated is None:
        stated = next((precision for pattern, precision in _REPOSITORIES if re.match(pattern, last)), None)
    if stated is None:
        return "none", ()
    return stated, (f"weights as published ({stated}), for neither the path nor a config.json says otherwise",)


def precision_by_config(config: Mapping[str, Any]) -> Read | None:
    """The precision that ``config.json`` states; None where it says nothing of quantisation. A method that is not known
    here is told as an assumption, for the plan then counts sixteen bits."""
    block = config.get("quantization_config")
    if not isinstance(block, Mapping):
        return None
    method = str(block.get("quant_method", block.get("quant_algo", "none")))
    if method == "fp8":
        if config.get("expert_dtype") == "fp4":
            return "mxfp4_experts", ("config.json: experts alone are in four bits",)
        return ("fp8_ue8m0" if block.get("scale_fmt") == "ue8m0" else "fp8"), ()
    if method == "mxfp4":
        return "mxfp4_experts", ("config.json: experts alone are in four bits",)
    bits = _bits(method, block)
    if bits is not None and bits[0] == 4:
        return "int4", (f"config.json: {method} weights {_FOUR_BITS}",)
    if bits == (8, True):
        return "fp8", ()
    return "none", (f"config.json: quant_method {method[:40]} is not known here, so weights are counted in 16 bits",)


def _bits(method: str, block: Mapping[str, Any]) -> tuple[int, bool] | None:
    """Bits of a weight and whether they are a floating-point number, as each tool writes them.

    Sources: transformers ``utils/quantization_config.py`` (gptq, awq, auto-round: ``bits``; bitsandbytes:
    ``load_in_4bit``); compressed-tensors ``QuantizationArgs``; NVIDIA ModelOpt's ``quant_algo``.
    """
    if method in ("gptq", "awq", "auto-round"):
        bits = block.get("bits", block.get("w_bit"))
        return (bits, False) if isinstance(bits, int) else None
    if method == "bitsandbytes":
        return (4, False) if block.get("load_in_4bit") else (8, False)
    algorithm = str(block.get("quant_algo", "")).upper()
    if algorithm:
        return {"NVFP4": (4, True), "W4A16_AWQ": (4, False), "FP8": (8, True)}.get(algorithm)
    groups = block.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
            return weights["num_bits"], weights.get("type") == "float"
    return None
