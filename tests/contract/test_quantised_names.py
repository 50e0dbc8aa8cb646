"""The rule of each family says what is quantised and what is kept, for every name that its models have.

The lists below are written by hand from the official quantised checkpoints (``quantised_names.py`` names them), layer
numbers left out.
"""

from __future__ import annotations

import re

import pytest

from lockstep.config.section import Quantisation as ConfigQuantisation
from lockstep.model.weights import ModelWeights
from lockstep.numerics.blocks import QuantisationError
from lockstep.records import Quantisation
from lockstep.refit.names import as_checkpoint
from lockstep.refit.quantised import quantised
from lockstep.refit.quantised_names import FAMILIES, REFUSED, check_scheme, family, form_of, role, scale_name
from lockstep.refit.transports import whole_tensors
from tests.contract.tiny_models import CONFIGS, tiny_model

ATTENTION = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
LATENT = {f"self_attn.{x}.weight" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
MLP = {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
SHARED = {f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")}
STACKS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
EXPERTS = {f"mlp.experts.N.{x}_proj.weight" for x in ("gate", "up", "down")}
INDEXER = {"self_attn.indexer.wq_b.weight", "self_attn.indexer.wk.weight"}

LINEARS: dict[str, set[str]] = {
    "llama": ATTENTION | MLP,
    "mistral": ATTENTION | MLP,
    "qwen2": ATTENTION | MLP,
    "qwen3": ATTENTION | MLP,
    "qwen3_moe": ATTENTION,
    "glm4_moe": ATTENTION | MLP | SHARED,
    "deepseek_v3": LATENT | MLP | SHARED,
    "deepseek_v32": LATENT | MLP | SHARED | INDEXER,
    "glm_moe_dsa": LATENT | MLP | SHARED | INDEXER,
    "deepseek_v4": SHARED
    | {f"self_attn.{x}.weight" for x in ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")}
    | {"self_attn.compressor.indexer.q_b_proj.weight"},
}
V4_CHECKPOINT = {
    "linear": {f"attn.{x}.weight" for x in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")}
    | {f"ffn.shared_experts.w{i}.weight" for i in (1, 2, 3)},
    "expert": {f"ffn.experts.N.w{i}.weight" for i in (1, 2, 3)},
}
KEPT_TOO = {
    "qwen3_moe": {"mlp.gate.weight", "self_attn.q_norm.weight"},
    "deepseek_v3": {"mlp.gate.weight", "mlp.gate.e_score_correction_bias", "self_attn.kv_a_layernorm.weight"},
    "glm_moe_dsa": {"self_attn.indexer.weights_proj.weight", "self_attn.indexer.k_norm.bias"},
    "deepseek_v4": {
        "self_attn.compressor.kv_proj.weight",
        "self_attn.compressor.gate_proj.weight",
        "self_attn.compressor.position_bias",
        "self_attn.compressor.indexer.kv_proj.weight",
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
        "self_attn.sinks",
        "attn_hc.fn",
        "ffn_hc.scale",
        "mlp.gate.tid2eid",
        "mlp.gate.weight",
    },
}


def in_layer(name: str) -> str:
    """The name within its layer; numbers of experts are N."""
    within = re.sub(r"^(model\.)?layers\.\d+\.", "", name)
    return re.sub(r"experts\.\d+\.", "experts.N.", within)


def by_role(model_type: str, names: list[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"linear": set(), "expert": set(), "kept": set()}
    for name in names:
        found[role(model_type, name)].add(in_layer(name))
    return found


def test_every_family_of_the_table_has_a_list_and_a_tiny_model() -> None:
    assert FAMILIES.keys() == LINEARS.keys()
    assert FAMILIES.keys() <= CONFIGS.keys()
    assert not FAMILIES.keys() & REFUSED.keys()
    assert ConfigQuantisation == Quantisation


@pytest.mark.parametrize("model_type", FAMILIES)
def test_module_names(model_type: str) -> None:
    names = [spec.name for spec in ModelWeights(tiny_model(model_type), 0).manifest().tensors]
    found = by_role(model_type, names)
    assert found["linear"] == LINEARS[model_type]
    assert found["expert"] == (STACKS if family(model_type).experts else set())
    kept = {in_layer(name) for name in names} - found["linear"] - found["expert"]
    assert found["kept"] == kept
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= found["kept"]
    assert {"input_layernorm.weight", "post_attention_layernorm.weight"} <= found["kept"]
    assert KEPT_TOO.get(model_type, set()) <= found["kept"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_checkpoint_names_have_the_same_roles(model_type: str) -> None:
    source = ModelWeights(tiny_model(model_type), 0)
    names = [spec.name for spec in as_checkpoint(source).manifest().tensors]
    found = by_role(model_type, names)
    if model_type == "deepseek_v4":
        assert {kind: found[kind] for kind in V4_CHECKPOINT} == V4_CHECKPOINT
        assert {"attn.attn_sink", "hc_attn_fn", "ffn.gate.weight", "attn.compressor.wkv.weight"} <= found["kept"]
        assert {"embed.weight", "head.weight", "attn.indexer.weights_proj.weight"} <= found["kept"]
    else:
        assert found["linear"] == LINEARS[model_type]
        assert found["expert"] == (EXPERTS if family(model_type).experts else set())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_manifest_has_a_scale_beside_each_quantised_weight_in_its_group(model_type: str) -> None:
    source = ModelWeights(tiny_model(model_type), 3)
    for plain in (source, as_checkpoint(source)):
        manifest = quantised(plain, "fp8").manifest()
        assert manifest.quantisation == "fp8"
        assert manifest.version == 3
        specs = {spec.name: spec for spec in manifest.tensors}
        codes = [spec for spec in manifest.tensors if spec.scale]
        assert codes
        assert {spec.name for spec in codes} == {
            spec.name for spec in plain.manifest().tensors if role(model_type, spec.name) != "kept"
        }
        order = [spec.name for spec in manifest.tensors]
        for spec in codes:
            assert spec.dtype == "float8_e4m3fn"
            assert specs[spec.scale].dtype == "float32"
            assert specs[spec.scale].group == spec.group
            assert order.index(spec.scale) == order.index(spec.name) + 1
        tensors = whole_tensors(quantised(plain, "fp8"))
        sent = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors}
        assert sent == {spec.name: (spec.shape, f"torch.{spec.dtype}") for spec in manifest.tensors}


def test_scales_have_the_names_that_published_checkpoints_have() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    assert scale_name("deepseek_v3", "checkpoint", name) == f"{name}_scale_inv"
    assert scale_name("qwen3_moe", "module", "mlp.experts.down_proj") == "mlp.experts.down_proj_scale_inv"
    assert scale_name("deepseek_v4", "checkpoint", "layers.0.attn.wq_a.weight") == "layers.0.attn.wq_a.scale"
    assert scale_name("deepseek_v4", "module", "a.weight") == "a.weight_scale_inv"


def test_mxfp4_takes_the_experts_and_what_is_beside_them_follows_the_family() -> None:
    expert, linear = "model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.o_proj.weight"
    assert form_of("qwen3_moe", "mxfp4_experts", expert) == "mxfp4"
    assert form_of("qwen3_moe", "mxfp4_experts", linear) is None
    assert form_of("deepseek_v4", "mxfp4_experts", "model.layers.0.self_attn.o_a_proj.weight") == "fp8_ue8m0"
    assert form_of("qwen3_moe", "fp8_ue8m0", expert) == "fp8_ue8m0"
    assert form_of("qwen3_moe", "none", expert) is None


def test_what_the_table_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(QuantisationError, match=r"model\.layers\.0\.self_attn\.new_proj\.weight is unknown"):
        role("qwen3_moe", "model.layers.0.self_attn.new_proj.weight")
    with pytest.raises(QuantisationError, match=r"gpt_oss has no quantised form: its module stacks are transposed"):
        check_scheme("gpt_oss", "fp8")
    with pytest.raises(QuantisationError, match=r"no official checkpoint says .* known: llama"):
        check_scheme("falcon", "fp8")
    with pytest.raises(QuantisationError, match=r"llama has no experts"):
        check_scheme("llama", "mxfp4_experts")
    check_scheme("falcon", "none")
