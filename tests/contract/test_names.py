"""Names of tensors, module to checkpoint and back, for every architecture of ours that transformers has.

The truth is not ours: what ``save_pretrained`` writes, since transformers turns its modules' names back into those of
the published checkpoints; for DeepSeek-V4, which it does not write so, the names of the official release by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lockstep.model.weights import ModelWeights
from lockstep.records import Manifest, TensorSpec
from lockstep.refit.name_tables import TABLES, NameMapError, matched
from lockstep.refit.names import as_checkpoint, as_module, families
from tests.contract.tiny_models import CONFIGS, tiny_model

OFFICIAL = ("deepseek_v4", "inkling_text")
INTERLEAVED = ("inkling_text",)
"""Whose checkpoints weave gate and up row by row: no contiguous part of one tensor."""


def source_of(model_type: str, **overrides: Any) -> ModelWeights:
    return ModelWeights(tiny_model(model_type, **overrides), version=3)


def tensors(source: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, shape, offset, tensor in source.shards():
        assert tuple(tensor.shape) == shape
        assert not any(offset)
        assert name not in found
        found[name] = tensor
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_every_architecture_of_ours_has_a_table_and_every_table_an_architecture() -> None:
    assert set(families()) == set(CONFIGS)


@pytest.mark.parametrize("model_type", [name for name in CONFIGS if name not in OFFICIAL])
def test_checkpoint_names_shapes_and_bytes_are_those_that_transformers_saves(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    truth = saved(model, tmp_path)
    source = as_checkpoint(ModelWeights(model, version=3))
    manifest, ours = source.manifest(), tensors(source)
    assert ours.keys() == truth.keys()
    for spec in manifest.tensors:
        assert spec.shape == tuple(truth[spec.name].shape)
        assert same_bits(ours[spec.name], truth[spec.name]), spec.name
    assert (manifest.version, manifest.naming, manifest.model_type) == (3, "checkpoint", model_type)


def official_v4(config: Any) -> Iterator[str]:
    """Names of the official DeepSeek-V4 release, written by hand from its weights' index and reference code."""
    yield from ("embed.weight", "norm.weight", "head.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        yield from (at + f"hc_{part}_{what}" for part in ("attn", "ffn") for what in ("fn", "base", "scale"))
        yield from (at + "attn_norm.weight", at + "ffn_norm.weight", at + "attn.attn_sink")
        for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "q_norm", "kv_norm"):
            yield at + f"attn.{name}.weight"
        kind = config.layer_types[layer]
        compressors = {"sliding_attention": (), "heavily_compressed_attention": ("attn.compressor.",)}.get(
            kind, ("attn.compressor.", "attn.indexer.compressor.")
        )
        for compressor in compressors:
            yield from (at + compressor + name for name in ("wkv.weight", "wgate.weight", "norm.weight", "ape"))
        if kind == "compressed_sparse_attention":
            yield from (at + "attn.indexer.wq_b.weight", at + "attn.indexer.weights_proj.weight")
        yield at + "ffn.gate.weight"
        yield at + ("ffn.gate.tid2eid" if config.mlp_layer_types[layer] == "hash_moe" else "ffn.gate.bias")
        owners = [*(f"ffn.experts.{e}" for e in range(config.n_routed_experts)), "ffn.shared_experts"]
        yield from (at + f"{owner}.{w}.weight" for owner in owners for w in ("w1", "w2", "w3"))


def test_deepseek_v4_has_the_official_names_and_a_folder_under_them_loads_as_the_same_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = tiny_model("deepseek_v4")
    ours = tensors(as_checkpoint(ModelWeights(model, version=0)))
    assert sorted(ours) == sorted(official_v4(model.config))
    experts, at = model.model.layers[1].mlp.experts, "layers.1.ffn.experts.5."
    half = experts.gate_up_proj.shape[1] // 2
    assert torch.equal(ours[at + "w1.weight"], experts.gate_up_proj[5, :half])
    assert torch.equal(ours[at + "w3.weight"], experts.gate_up_proj[5, half:])
    assert torch.equal(ours[at + "w2.weight"], experts.down_proj[5])
    # transformers reads the official release by its own conversion: it must find the same model in ours.
    model.config.save_pretrained(tmp_path)
    save_file({name: tensor.contiguous() for name, tensor in ours.items()}, tmp_path / "model.safetensors")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    state = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert same_bits(state[name], tensor), name


def test_inkling_has_the_names_and_interleaving_that_transformers_saves_for_the_whole_model(tmp_path: Path) -> None:
    """The published model has towers for pictures and sound beside the text; of it the text's part is compared."""
    from transformers.models.inkling.configuration_inkling import InklingConfig
    from transformers.models.inkling.modeling_inkling import InklingForConditionalGeneration

    model = tiny_model("inkling_text", num_hidden_layers=3)
    with torch.device("meta"):
        whole = InklingForConditionalGeneration(InklingConfig(text_config=model.config))
    state = {name.replace("model.language_model.", "model.", 1): name for name in whole.state_dict()}
    text = {state[name]: tensor for name, tensor in model.state_dict().items()}
    whole.load_state_dict(text, strict=False, assign=True)
    other = {name: torch.zeros(1) for name in whole.state_dict() if name not in text}
    whole.save_pretrained(tmp_path, state_dict={**text, **other})
    truth = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    truth = {name: tensor for name, tensor in truth.items() if name.startswith("model.llm.")}
    ours = tensors(as_checkpoint(ModelWeights(model, version=0)))
    assert ours.keys() == truth.keys()
    for name, tensor in ours.items():
        assert same_bits(tensor, truth[name]), name


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_there_and_back_again_is_equal_in_every_bit_and_copies_only_what_is_interleaved(model_type: str) -> None:
    source = source_of(model_type)
    there = as_checkpoint(source)
    back = as_module(there)
    before, after = tensors(source), tensors(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert same_bits(tensor, after[name]), name
    module = {spec.name: spec for spec in source.manifest().tensors}
    for spec in back.manifest().tensors:
        assert (spec.shape, spec.dtype, spec.trainable) == (
            module[spec.name].shape,
            module[spec.name].dtype,
            module[spec.name].trainable,
        )
    assert back.manifest().tied == source.manifest().tied
    storages = {tensor.untyped_storage().data_ptr() for tensor in before.values()}
    copied = [n for n, tensor in tensors(there).items() if tensor.untyped_storage().data_ptr() not in storages]
    assert all("w13" in name for name in copied)
    assert bool(copied) == (model_type == "inkling_text")


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_shards_follow_the_manifest_and_groups_stay_together(model_type: str) -> None:
    source = as_checkpoint(source_of(model_type))
    manifest = source.manifest()
    assert [name for name, *_ in source.shards()] == [spec.name for spec in manifest.tensors]
    groups = [spec.group for spec in manifest.tensors]
    changes = sum(one != other for one, other in pairwise(groups))
    assert changes + 1 == len(set(groups)), "a group is split"
    members = {group: groups.count(group) for group in groups}
    assert all(members[group] > 1 for group in groups if group.endswith(".experts"))
    assert any(members[group] > 1 for group in groups), "q, k, v or gate, up belong together"


@pytest.mark.parametrize("model_type", sorted(TABLES))
def test_a_name_has_one_row_on_each_side(model_type: str) -> None:
    source = source_of(model_type)
    for side, names in (
        ("module", [spec.name for spec in source.manifest().tensors]),
        ("checkpoint", [spec.name for spec in as_checkpoint(source).manifest().tensors]),
    ):
        for name in names:
            hits = [row for row in TABLES[model_type] for t in getattr(row, side) if matched(t, name) is not None]
            assert len(hits) == 1, name


class Listed:
    """A source of given tensors."""

    def __init__(self, model_type: str, given: dict[str, torch.Tensor], **manifest: Any) -> None:
        self.model_type, self.given, self.extra = model_type, given, manifest

    def manifest(self) -> Manifest:
        specs = tuple(TensorSpec(n, tuple(t.shape), str(t.dtype)[6:], n) for n, t in self.given.items())
        return Manifest(1, specs, model_type=self.model_type, **self.extra)

    def shards(self) -> Any:
        return ((n, tuple(t.shape), (0,) * t.ndim, t) for n, t in self.given.items())


EXPERTS = "model.layers.0.mlp.experts."


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layers=st.integers(1, 3),
    experts=st.integers(1, 13),
    rows=st.integers(1, 4),
    columns=st.integers(1, 3),
    data=st.data(),
)
def test_expert_stacks_of_any_size_and_in_any_order_are_cut_by_expert(
    layers: int, experts: int, rows: int, columns: int, data: Any
) -> None:
    given_tensors = {
        f"model.layers.{layer}.mlp.experts.{name}": torch.randn(experts, *shape)
        for layer in range(layers)
        for name, shape in (("gate_up_proj", (2 * rows, columns)), ("down_proj", (columns, rows)))
    }
    order = data.draw(st.permutations(sorted(given_tensors)))
    source = Listed("qwen3_moe", {name: given_tensors[name] for name in order})
    there = as_checkpoint(source)
    cut = tensors(there)
    assert len(cut) == layers * experts * 3
    for layer in range(layers):
        for e in range(experts):
            at, stack = f"model.layers.{layer}.mlp.experts.{e}.", f"model.layers.{layer}.mlp.experts."
            assert torch.equal(cut[at + "gate_proj.weight"], given_tensors[stack + "gate_up_proj"][e, :rows])
            assert torch.equal(cut[at + "up_proj.weight"], given_tensors[stack + "gate_up_proj"][e, rows:])
            assert torch.equal(cut[at + "down_proj.weight"], given_tensors[stack + "down_proj"][e])
    groups = [spec.group for spec in there.manifest().tensors]
    assert groups == sorted(groups, key=groups.index)
    back = tensors(as_module(there))
    assert all(torch.equal(back[name], tensor) for name, tensor in given_tensors.items())


@settings(max_examples=25, deadline=None)
@given(experts=st.integers(1, 6), rows=st.integers(1, 5), cut=st.tuples(st.integers(0, 6), st.integers(0, 10)))
def test_a_shard_of_a_stack_gives_the_shards_of_its_experts(experts: int, rows: int, cut: tuple[int, int]) -> None:
    whole = torch.randn(experts, 2 * rows, 3)
    at = (min(cut[0], experts), min(cut[1], 2 * rows))
    name = EXPERTS + "gate_up_proj"

    class Sharded(Listed):
        def shards(self) -> Any:
            yield name, tuple(whole.shape), (at[0], at[1], 0), whole[at[0] :, at[1] :]

    pieces = list(as_checkpoint(Sharded("qwen3_moe", {name: whole})).shards())
    seen = 0
    for piece, shape, offset, tensor in pieces:
        e, part = piece.removeprefix(EXPERTS).split(".")[:2]
        expected = whole[int(e), :rows] if part == "gate_proj" else whole[int(e), rows:]
        assert shape == (rows, 3)
        assert torch.equal(tensor, expected[offset[0] : offset[0] + tensor.shape[0]])
        seen += tensor.numel()
    assert seen == whole[at[0] :, at[1] :].numel()


def test_unknown_names_and_families_are_refused_by_name() -> None:
    with pytest.raises(NameMapError, match=r"model\.layers\.0\.mlp\.novelty\.weight"):
        as_checkpoint(Listed("qwen3_moe", {"model.layers.0.mlp.novelty.weight": torch.zeros(2)}))
    with pytest.raises(NameMapError, match="no name table for 'mamba'"):
        as_checkpoint(Listed("mamba", {"a": torch.zeros(1)}))
    with pytest.raises(NameMapError, match="without a row"):  # experts of a dense model
        as_checkpoint(Listed("qwen3", {EXPERTS + "down_proj": torch.zeros(2, 2, 2)}))
    with pytest.raises(NameMapError, match="not 2 equal parts"):
        as_checkpoint(Listed("qwen3_moe", {EXPERTS + "gate_up_proj": torch.zeros(2, 3, 2)}))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_lies_in_a_sources_tensors_is_what_the_translation_brings(model_type: str) -> None:
    source = source_of(model_type)
    translated: Any = as_checkpoint(source)
    expected = tensors(translated)
    found = translated.originals()
    assert (found is None) is (model_type in INTERLEAVED)
    if found is None:
        return
    same, originals = found
    assert same is source
    seen: dict[str, torch.Tensor] = {}
    for name, _, _, tensor in source.shards():
        original = originals[name]
        assert (original.spec.name, original.spec.shape) == (name, tuple(tensor.shape))
        assert original.names == {part for part, _ in original.parts}
        views = {part: tensor.contiguous().as_strided(*geometry) for part, geometry in original.parts}
        assert sum(view.numel() for view in views.values()) == tensor.numel()
        seen |= views
    assert seen.keys() == expected.keys()
    assert [name for name, view in seen.items() if not same_bits(view, expected[name])] == []


def test_a_quantised_source_is_translated_before_it_is_quantised() -> None:
    source = Listed("qwen3_moe", {EXPERTS + "down_proj": torch.zeros(2, 2, 2)}, quantisation="fp8")
    with pytest.raises(NameMapError, match="translate its names first"):
        as_checkpoint(source)


def test_half_a_stack_or_half_a_pair_is_refused_by_name() -> None:
    names = {EXPERTS + f"{e}.gate_proj.weight": torch.zeros(2, 2) for e in range(3)}
    names |= {EXPERTS + f"{e}.up_proj.weight": torch.zeros(2, 2) for e in range(2)}
    with pytest.raises(NameMapError, match=r"experts\.gate_up_proj needs 6 tensors.* 5 are here"):
        as_module(Listed("qwen3_moe", names, naming="checkpoint"))
    with pytest.raises(NameMapError, match="needs 2 tensors"):
        as_checkpoint(Listed("inkling_text", {"model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)}))


def test_a_source_that_already_has_the_names_is_left_alone() -> None:
    source = source_of("qwen3_moe")
    assert as_module(source) is source
    there = as_checkpoint(source)
    assert as_checkpoint(there) is there


def test_a_tensor_that_comes_twice_or_is_not_in_the_manifest_is_refused() -> None:
    stack = {EXPERTS + "down_proj": torch.zeros(2, 2, 2)}

    class Twice(Listed):
        def shards(self) -> Any:
            return (shard for _ in range(2) for shard in Listed.shards(self))

    with pytest.raises(NameMapError, match="twice"):
        list(as_checkpoint(Twice("qwen3_moe", stack)).shards())

    class Other(Listed):
        def shards(self) -> Any:
            yield "lm_head.weight", (1,), (0,), torch.zeros(1)

    with pytest.raises(NameMapError, match="not in its manifest"):
        list(as_checkpoint(Other("qwen3_moe", stack)).shards())
