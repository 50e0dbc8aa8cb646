"""What a refit sees of the trainer: everything once, in atomic groups, live."""

from __future__ import annotations

import pytest
import torch

from lockstep.model.weights import ModelWeights, atomic_group
from tests.contract.tiny_models import CONFIGS, tiny_model


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_the_manifest_covers_the_saved_state_once_and_matches_the_shards(model_type: str) -> None:
    model = tiny_model(model_type)
    source = ModelWeights(model, version=7)
    manifest = source.manifest()
    assert manifest.version == 7
    names = [spec.name for spec in manifest.tensors]
    assert len(names) == len(set(names))
    assert set(names) | set(manifest.tied) == set(model.state_dict())
    state = model.state_dict()
    for spec, (name, shape, offset, tensor) in zip(manifest.tensors, source.shards(), strict=True):
        assert (spec.name, spec.shape) == (name, shape)
        assert offset == (0,) * len(shape)
        assert tensor.data_ptr() == state[name].data_ptr()
        assert not tensor.requires_grad
        assert spec.dtype == str(tensor.dtype).removeprefix("torch.")


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_members_of_an_atomic_group_follow_each_other(model_type: str) -> None:
    groups = [spec.group for spec in ModelWeights(tiny_model(model_type), 0).manifest().tensors]
    changes = [a for a, b in zip(groups, [*groups[1:], None], strict=True) if a != b]
    assert len(changes) == len(set(changes))


def test_groups_are_what_engines_fuse() -> None:
    layer = "model.layers.0."
    assert {atomic_group(f"{layer}self_attn.{p}_proj.weight") for p in "qkv"} == {f"{layer}self_attn.qkv"}
    assert atomic_group(f"{layer}self_attn.q_proj.bias") == f"{layer}self_attn.qkv"
    assert {atomic_group(f"{layer}mlp.{p}_proj.weight") for p in ("gate", "up")} == {f"{layer}mlp.gate_up"}
    experts = {atomic_group(f"{layer}mlp.experts.{p}_proj") for p in ("gate_up", "down")}
    assert experts == {f"{layer}mlp.experts"}
    assert atomic_group(f"{layer}mlp.experts.3.up_proj.weight") == f"{layer}mlp.experts"
    latent = {atomic_group(f"{layer}self_attn.{p}.weight") for p in ("q_a_proj", "kv_a_proj_with_mqa")}
    assert latent == {f"{layer}self_attn.qkv_a"}
    assert atomic_group(f"{layer}self_attn.o_proj.weight") == f"{layer}self_attn.o_proj.weight"


def test_tied_tensors_travel_once_under_their_first_name() -> None:
    manifest = ModelWeights(tiny_model("llama"), 0).manifest()
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in {spec.name for spec in manifest.tensors}


def test_policy_buffers_travel_and_are_not_trainable() -> None:
    specs = {spec.name: spec for spec in ModelWeights(tiny_model("deepseek_v4"), 0).manifest().tensors}
    buffers = [name for name in specs if name.endswith(("tid2eid", "e_score_correction_bias"))]
    assert len(buffers) == 4
    assert not any(specs[name].trainable for name in buffers)
    assert not any("inv_freq" in name for name in specs)


def test_shards_are_live() -> None:
    model = tiny_model("qwen3")
    source = ModelWeights(model, 0)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    assert float({n: t for n, _, _, t in source.shards()}["model.norm.weight"].mean()) == 3.0
