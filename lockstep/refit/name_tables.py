"""The name tables: per model family, transformers' module names beside those of its published checkpoints.

A template has placeholders: ``{n}`` a layer, ``{e}`` an expert, ``{p:q_proj|k_proj}`` one of these words. Sources: the
checkpoints' own index files, and transformers' ``conversion_mapping.py``, which reads them. gpt-oss publishes its
bfloat16 weights in the modules' own layout (stacks transposed and gate/up interleaved), DeepSeek-V4 and Inkling under
their own reference code's names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal


class NameMapError(ValueError):
    """A tensor name that can't be translated; the text names it."""


Layout = Literal["same", "experts", "interleaved"]


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors of one kind on both sides. ``group``: template of the atomic group (engines fuse its members at load);
    empty: each alone.

    Layouts: ``same``, one tensor under two names; ``experts``, a stack [E, parts · I, …] against one tensor [I, …] per
    expert and part; ``interleaved``, gate and up (two tensors, or the halves of one along ``dim``) against one whose
    rows along ``dim`` are gate, up, gate, up, …
    """

    module: tuple[str, ...]
    checkpoint: tuple[str, ...]
    layout: Layout = "same"
    group: str = ""
    dim: int = 0


_PLACEHOLDER = re.compile(r"\{(\w+)(?::([^}]*))?\}")


@cache
def _pattern(template: str) -> re.Pattern[str]:
    pieces, end = [], 0
    for found in _PLACEHOLDER.finditer(template):
        pieces += [re.escape(template[end : found.start()]), f"(?P<{found[1]}>{found[2] or '[0-9]+'})"]
        end = found.end()
    return re.compile("".join([*pieces, re.escape(template[end:])]))


def matched(template: str, name: str) -> dict[str, str] | None:
    """The placeholders of ``name`` under ``template``; None if it is another name."""
    found = _pattern(template).fullmatch(name)
    return None if found is None else found.groupdict()


def filled(template: str, values: dict[str, str]) -> str:
    """The template with its placeholders filled in."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], template)


def _same(template: str, group: str = "") -> Row:
    return Row((template,), (template,), group=group)


def _renamed(module: str, checkpoint: str, group: str = "") -> Row:
    return Row((module,), (checkpoint,), group=group)


L = "model.layers.{n}."
_W = "{w:weight|bias}"

_AROUND = (
    _same("{p:model.embed_tokens|model.norm|lm_head}.weight"),
    _same(L + "{p:input_layernorm|post_attention_layernorm}.weight"),
)
_ATTENTION = (
    _same(L + "self_attn.{p:q_proj|k_proj|v_proj}." + _W, group=L + "self_attn.qkv"),
    _same(L + "self_attn.o_proj." + _W),
)
_HEAD_NORMS = (_same(L + "self_attn.{p:q_norm|k_norm}.weight"),)
_MLP = (
    _same(L + "mlp.{p:gate_proj|up_proj}." + _W, group=L + "mlp.gate_up"),
    _same(L + "mlp.down_proj." + _W),
)
_EXPERTS = (
    Row(
        (L + "mlp.experts.gate_up_proj",),
        (L + "mlp.experts.{e}.gate_proj.weight", L + "mlp.experts.{e}.up_proj.weight"),
        layout="experts",
        group=L + "mlp.experts",
    ),
    Row(
        (L + "mlp.experts.down_proj",),
        (L + "mlp.experts.{e}.down_proj.weight",),
        layout="experts",
        group=L + "mlp.experts",
    ),
    _same(L + "mlp.gate.weight"),
)
_SHARED_EXPERTS = (
    _same(L + "mlp.gate.e_score_correction_bias"),
    _same(L + "mlp.shared_experts.{p:gate_proj|up_proj}.weight", group=L + "mlp.shared_experts.gate_up"),
    _same(L + "mlp.shared_experts.down_proj.weight"),
)
_LATENT = (
    # Without a low rank for queries there is one q_proj.
    _same(L + "self_attn.{p:q_a_proj|kv_a_proj_with_mqa|q_proj}." + _W, group=L + "self_attn.qkv_a"),
    _same(L + "self_attn.{p:q_a_layernorm|kv_a_layernorm|q_b_proj|kv_b_proj}.weight"),
    _same(L + "self_attn.o_proj." + _W),
)
_INDEXER = (_same(L + "self_attn.indexer.{p:wq_b|wk|weights_proj|k_norm}." + _W, group=L + "self_attn.indexer"),)
_GPT_OSS = (
    _same(L + "self_attn.sinks"),
    _same(L + "mlp.router." + _W),
    # Published as the modules have it: [E, H, 2I] with gate and up interleaved, biases beside.
    _same(L + "mlp.experts.{p:gate_up_proj|down_proj}", group=L + "mlp.experts"),
    _same(L + "mlp.experts.{p:gate_up_proj|down_proj}_bias", group=L + "mlp.experts"),
)

_V4 = "layers.{n}."
_COMPRESSOR, _V4_INDEXER = L + "self_attn.compressor.", L + "self_attn.compressor.indexer."
_DEEPSEEK_V4 = (
    _renamed("model.embed_tokens.weight", "embed.weight"),
    _renamed("model.norm.weight", "norm.weight"),
    _renamed("lm_head.weight", "head.weight"),
    _renamed("model.hc_head.hc_{p:fn|base|scale}", "hc_head_{p:fn|base|scale}"),
    _renamed(L + "{p:attn|ffn}_hc.{q:fn|base|scale}", _V4 + "hc_{p:attn|ffn}_{q:fn|base|scale}"),
    _renamed(L + "input_layernorm.weight", _V4 + "attn_norm.weight"),
    _renamed(L + "post_attention_layernorm.weight", _V4 + "ffn_norm.weight"),
    _renamed(L + "self_attn.sinks", _V4 + "attn.attn_sink"),
    _renamed(L + "self_attn.q_a_proj.weight", _V4 + "attn.wq_a.weight", group=_V4 + "attn.wqa_wkv"),
    _renamed(L + "self_attn.kv_proj.weight", _V4 + "attn.wkv.weight", group=_V4 + "attn.wqa_wkv"),
    _renamed(L + "self_attn.q_a_norm.weight", _V4 + "attn.q_norm.weight"),
    _renamed(L + "self_attn.kv_norm.weight", _V4 + "attn.kv_norm.weight"),
    _renamed(L + "self_attn.q_b_proj.weight", _V4 + "attn.wq_b.weight"),
    _renamed(L + "self_attn.o_{p:a|b}_proj.weight", _V4 + "attn.wo_{p:a|b}.weight"),
    *(
        # The compressor, and the indexer's own compressor inside it (outside it in the checkpoint).
        _renamed(module + ours, checkpoint + theirs, group=checkpoint + "wkv_wgate" if fused else "")
        for module, checkpoint in (
            (_COMPRESSOR, _V4 + "attn.compressor."),
            (_V4_INDEXER, _V4 + "attn.indexer.compressor."),
        )
        for ours, theirs, fused in (
            ("kv_proj.weight", "wkv.weight", True),
            ("gate_proj.weight", "wgate.weight", True),
            ("kv_norm.weight", "norm.weight", False),
            ("position_bias", "ape", False),
        )
    ),
    _renamed(_V4_INDEXER + "q_b_proj.weight", _V4 + "attn.indexer.wq_b.weight"),
    _renamed(_V4_INDEXER + "scorer.weights_proj.weight", _V4 + "attn.indexer.weights_proj.weight"),
    _renamed(L + "mlp.gate.{p:weight|tid2eid}", _V4 + "ffn.gate.{p:weight|tid2eid}"),
    _renamed(L + "mlp.gate.e_score_correction_bias", _V4 + "ffn.gate.bias"),
    Row(
        (L + "mlp.experts.gate_up_proj",),
        (_V4 + "ffn.experts.{e}.w1.weight", _V4 + "ffn.experts.{e}.w3.weight"),
        layout="experts",
        group=_V4 + "ffn.experts",
    ),
    Row(
        (L + "mlp.experts.down_proj",),
        (_V4 + "ffn.experts.{e}.w2.weight",),
        layout="experts",
        group=_V4 + "ffn.experts",
    ),
    *(
        _renamed(
            L + f"mlp.shared_experts.{ours}.weight",
            _V4 + f"ffn.shared_experts.{theirs}.weight",
            group=_V4 + "ffn.shared_experts.w1_w3" if fused else "",
        )
        for ours, theirs, fused in (("gate_proj", "w1", True), ("up_proj", "w3", True), ("down_proj", "w2", False))
    ),
)

_INK = "model.llm.layers.{n}."
_INKLING = (
    _renamed("model.embed_tokens.weight", "model.llm.embed.weight"),
    _renamed("model.embed_tokens.embed_norm.weight", "model.llm.embed_norm.weight"),
    _renamed("model.norm.weight", "model.llm.norm.weight"),
    _renamed("lm_head.weight", "model.llm.unembed.weight"),
    _renamed(L + "input_layernorm.weight", _INK + "attn_norm.weight"),
    _renamed(L + "post_attention_layernorm.weight", _INK + "mlp_norm.weight"),
    *(
        _renamed(L + f"self_attn.{ours}.weight", _INK + f"attn.{theirs}.weight", group=_INK + "attn.wqkvr")
        for ours, theirs in (("q_proj", "wq_du"), ("k_proj", "wk_dv"), ("v_proj", "wv_dv"), ("r_proj", "wr_du"))
    ),
    _renamed(L + "self_attn.o_proj.weight", _INK + "attn.wo_ud.weight"),
    _renamed(L + "self_attn.{p:q|k}_norm.weight", _INK + "attn.{p:q|k}_norm.weight"),
    _renamed(L + "self_attn.{p:k|v}_sconv.conv1d.weight", _INK + "attn.{p:k|v}_sconv.weight"),
    _renamed(L + "self_attn.rel_logits_proj.proj", _INK + "attn.rel_logits_proj.proj"),
    _renamed(L + "{p:attn|mlp}_sconv.conv1d.weight", _INK + "{p:attn|mlp}_sconv.weight"),
    _renamed(L + "mlp.gate.{p:weight|global_scale}", _INK + "mlp.gate.{p:weight|global_scale}"),
    _renamed(L + "mlp.gate.e_score_correction_bias", _INK + "mlp.gate.bias"),
    Row(
        (L + "mlp.experts.gate_up_proj",),
        (_INK + "mlp.experts.w13_weight",),
        layout="interleaved",
        group=_INK + "mlp.experts",
        dim=1,
    ),
    _renamed(L + "mlp.experts.down_proj", _INK + "mlp.experts.w2_weight", group=_INK + "mlp.experts"),
    Row(
        (L + "mlp.shared_experts.gate_proj", L + "mlp.shared_experts.up_proj"),
        (_INK + "mlp.shared_experts.shared_w13_weight",),
        layout="interleaved",
        group=_INK + "mlp.shared_experts",
        dim=1,
    ),
    _renamed(
        L + "mlp.shared_experts.down_proj",
        _INK + "mlp.shared_experts.shared_w2_weight",
        group=_INK + "mlp.shared_experts",
    ),
    Row(
        (L + "mlp.gate_proj.weight", L + "mlp.up_proj.weight"),
        (_INK + "mlp.w13_dn.weight",),
        layout="interleaved",
    ),
    _renamed(L + "mlp.down_proj.weight", _INK + "mlp.w2_md.weight"),
    _renamed(L + "mlp.global_scale", _INK + "mlp.global_scale"),
)

_DENSE = (*_AROUND, *_ATTENTION, *_MLP)
_DEEPSEEK = (*_AROUND, *_LATENT, *_MLP, *_EXPERTS, *_SHARED_EXPERTS)

TABLES: dict[str, tuple[Row, ...]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": (*_DENSE, *_HEAD_NORMS),
    "qwen3_moe": (*_DENSE, *_HEAD_NORMS, *_EXPERTS),
    "glm4_moe": (*_DENSE, *_HEAD_NORMS, *_EXPERTS, *_SHARED_EXPERTS),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": (*_DEEPSEEK, *_INDEXER),
    "glm_moe_dsa": (*_DEEPSEEK, *_INDEXER),
    "gpt_oss": (*_AROUND, *_ATTENTION, *_GPT_OSS),
    "deepseek_v4": _DEEPSEEK_V4,
    "inkling_text": _INKLING,
}
"""By transformers' ``model_type`` of the language model."""
