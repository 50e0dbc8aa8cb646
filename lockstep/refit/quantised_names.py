"""Which tensors of a model are quantised, by family: table rows, after the official quantised checkpoints.

Every name of a family is a linear, an expert or kept; a name that no pattern knows is refused, never guessed. Both
namings are in each row: transformers' modules (fused expert stacks) and published checkpoints (one tensor an expert).

Kept in every family: embeddings, output head, norms, biases, and routers with their correction biases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lockstep.numerics.blocks import QuantisationError
from lockstep.numerics.pairs import Format
from lockstep.records import Naming, Quantisation

Role = Literal["linear", "expert", "kept"]

_KEPT = (r"(^|\.)embed_tokens\.weight", r"lm_head\.weight", r"norm\.(weight|bias)", r"\.bias")
_ROUTER = (r"\.mlp\.gate\.(weight|e_score_correction_bias)",)
_MTP = (
    r"\.eh_proj\.weight",
    r"\.shared_head\.head\.weight",
)  # the layer of multi-token prediction; only in checkpoints
_ATTENTION = (r"\.self_attn\.[qkvo]_proj\.weight",)
_LATENT = (r"\.self_attn\.(q|q_a|q_b|kv_b|o)_proj\.weight", r"\.self_attn\.kv_a_proj_with_mqa\.weight")
_INDEXER = (r"\.self_attn\.indexer\.(wq_b|wk)\.weight",)
_MLP = (r"\.mlp\.(gate|up|down)_proj\.weight", r"\.mlp\.shared_experts\.(gate|up|down)_proj\.weight")
_EXPERTS = (r"\.mlp\.experts\.(gate_up|down)_proj", r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Family:
    """Patterns that end a name. ``beside_mxfp4``: what the linears are where the experts are mxfp4 (None: kept).
    ``source``: whose checkpoints say so."""

    linears: tuple[str, ...]
    kept: tuple[str, ...]
    source: str
    experts: tuple[str, ...] = ()
    beside_mxfp4: Format | None = None
    checkpoint_scale: tuple[str, str] = ("", "_scale_inv")  # in checkpoint names: this ending gives way to that


_DENSE = Family((*_ATTENTION, *_MLP), _KEPT, "Qwen/Qwen3-8B-FP8: modules_to_not_convert has the head; norms are 1-d")
_DEEPSEEK_V3 = Family(
    (*_LATENT, *_MLP),
    (*_KEPT, *_ROUTER, *_MTP),
    "deepseek-ai/DeepSeek-V3, README_WEIGHTS.md and its tensors: all projections of attention, MLP and experts",
    _EXPERTS,
)
_SPARSE_ATTENTION = Family(
    (*_LATENT, *_INDEXER, *_MLP),
    (*_KEPT, *_ROUTER, *_MTP, r"\.self_attn\.indexer\.weights_proj\.weight"),
    "deepseek-ai/DeepSeek-V3.2-Exp; zai-org/GLM-5-FP8: modules_to_not_convert has mlp.gate and the indexer's "
    "weights_proj (there: indexers_proj), its wq_b and wk are fp8",
    _EXPERTS,
)
_DEEPSEEK_V4 = Family(
    (
        r"\.self_attn\.(q_a|q_b|kv|o_a|o_b)_proj\.weight",
        r"\.self_attn\.compressor\.indexer\.q_b_proj\.weight",
        r"\.mlp\.shared_experts\.(gate|up|down)_proj\.weight",
        r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight",
        r"\.attn\.indexer\.wq_b\.weight",
        r"\.ffn\.shared_experts\.w[123]\.weight",
        r"^mtp\.\d+\.[eh]_proj\.weight",
    ),
    (
        *_KEPT,
        *_ROUTER,
        r"\.mlp\.gate\.tid2eid",
        r"\.compressor\.(indexer\.)?(kv_proj|gate_proj)\.weight",
        r"\.compressor\.(indexer\.)?position_bias",
        r"\.indexer\.scorer\.weights_proj\.weight",
        r"\.self_attn\.sinks",
        r"\.(attn_hc|ffn_hc)\.(fn|base|scale)",
        r"\.hc_head\.hc_(fn|base|scale)",
        # official names
        r"^(embed|head)\.weight",
        r"\.ffn\.gate\.(weight|tid2eid)",
        r"\.compressor\.(wkv|wgate)\.weight",
        r"\.compressor\.ape",
        r"\.indexer\.weights_proj\.weight",
        r"\.attn\.attn_sink",
        r"\.hc_(attn|ffn)_(fn|base|scale)",
        r"(^|^mtp\.\d+\.)hc_head_(fn|base|scale)",
    ),
    "deepseek-ai/DeepSeek-V4-Flash as transformers loads it (_keep_in_fp32_modules of deepseek_v4): compressors, the "
    "indexer's weights, sinks and hyper-connections have no scales; experts are fp4, all other linears fp8 with ue8m0",
    (*_EXPERTS, r"\.ffn\.experts\.\d+\.w[123]\.weight"),
    beside_mxfp4="fp8_ue8m0",
    checkpoint_scale=(".weight", ".scale"),
)

FAMILIES: dict[str, Family] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": Family(
        (*_ATTENTION, *_MLP),
        (*_KEPT, *_ROUTER),
        "Qwen/Qwen3-30B-A3B-FP8: modules_to_not_convert has the head, norms and every mlp.gate",
        _EXPERTS,
    ),
    "glm4_moe": Family(
        (*_ATTENTION, *_MLP),
        (*_KEPT, *_ROUTER, *_MTP),
        "zai-org/GLM-4.5-FP8: ignored are the head and every mlp.gate",
        _EXPERTS,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _SPARSE_ATTENTION,
    "glm_moe_dsa": _SPARSE_ATTENTION,
    "deepseek_v4": _DEEPSEEK_V4,
}
"""transformers' model types whose weights can be quantised."""

REFUSED = {
    "gpt_oss": "its module stacks are transposed and interleaved, so that blocks along their last dimension would not "
    "be the checkpoint's",
}
"""Model types that are left out on purpose, each with the reason."""


def family(model_type: str) -> Family:
    """The row of a model type. Raises QuantisationError, with the types there are, if it has none."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    why = REFUSED.get(model_type, "no official checkpoint says which of its tensors may be quantised")
    raise QuantisationError(f"{model_type or 'this model'} has no quantised form: {why}; known: {', '.join(FAMILIES)}")


def role(model_type: str, name: str) -> Role:
    """What a tensor is: linear, expert or kept. Raises QuantisationError if its family doesn't know the name."""
    row = family(model_type)
    kinds: tuple[tuple[Role, tuple[str, ...]], ...] = (
        ("linear", row.linears),
        ("expert", row.experts),
        ("kept", row.kept),
    )
    found: list[Role] = [kind for kind, patterns in kinds if any(re.search(f"(?:{p})$", name) for p in patterns)]
    if len(found) != 1:
        state = f"is {' and '.join(found)}" if found else "is unknown"
        raise QuantisationError(f"{name} {state} in the quantisation table of {model_type}: one role is needed")
    return found[0]


def form_of(model_type: str, scheme: Quantisation, name: str) -> Format | None:
    """The format in which a tensor travels; None: as it is. Raises QuantisationError for an unknown name or model."""
    kind = role(model_type, name)
    if scheme == "none" or kind == "kept":
        return None
    if scheme == "mxfp4_experts":
        return "mxfp4" if kind == "expert" else family(model_type).beside_mxfp4
    return scheme


def check_scheme(model_type: str, scheme: Quantisation) -> None:
    """Raise QuantisationError if a model type can't be quantised so."""
    if scheme == "none":
        return
    row = family(model_type)
    if scheme == "mxfp4_experts" and not row.experts:
        raise QuantisationError(f"{model_type} has no experts that {scheme} could quantise; use fp8 or fp8_ue8m0")


def scale_name(model_type: str, naming: Naming, name: str) -> str:
    """The name of a weight's block scales: ``X.weight_scale_inv`` for ``X.weight`` (DeepSeek-V3, Qwen3, GLM) and
    ``gate_up_proj_scale_inv`` for a stack (transformers); ``X.scale`` in DeepSeek-V4's official names."""
    ending, replacement = family(model_type).checkpoint_scale if naming == "checkpoint" else ("", "_scale_inv")
    return name.removesuffix(ending) + replacement
