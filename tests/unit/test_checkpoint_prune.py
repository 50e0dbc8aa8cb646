"""Pruning: what is left must be the full model cut after its layers, in transformers and for the validator."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from lockstep.checkpoint.errors import CheckpointError
from lockstep.checkpoint.expectation import expectation_of
from lockstep.checkpoint.expected import read_layout
from lockstep.checkpoint.expected.quantised import read_scheme
from lockstep.checkpoint.expected.rows import expand
from lockstep.checkpoint.headers import read_checkpoint
from lockstep.checkpoint.inspect import inspect
from lockstep.checkpoint.prune import Prune
from lockstep.checkpoint.records import CheckpointIndex, TensorEntry
from lockstep.checkpoint.weights import compare
from lockstep.topology.catalogue import model_shape
from tests.synthetic_checkpoints import write_checkpoint, write_files

AS_PUBLISHED = {
    "deepseek_v4_flash": (4, [0, 0, 4, 128]),
    "deepseek_v4_fp8": (4, [0, 0, 4, 128]),
    "glm_moe_dsa": (5, ["full", "full", "full", "shared", "shared"]),
    "glm_moe_dsa_fp8": (5, ["full", "full", "full", "shared", "shared"]),
    "inkling": (4, [0, 1, 2, 3]),
    "qwen3_moe": (5, None),
    "llama_tied": (2, None),
}
"""The pruned copies that recipes name (4-layer V4-Flash, 5-layer GLM-5.2, …), and what a list says of their layers."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def applied(prune: Prune, source: Path, target: Path) -> Path:
    """A transform carried out in the plainest way: everything in memory, written by safetensors."""
    index, tensors = read_checkpoint(source), tensors_of(source)
    made: dict[str, torch.Tensor] = {}
    for group in prune.outputs(index):
        result = prune.make(group, lambda name: tensors[name])
        assert result.keys() == {tensor.name for tensor in group.tensors}
        made |= result
    return write_files(target, prune.config(index), made, num_shards=2)


def refused(prune: Prune, config: dict[str, Any], names: Iterable[str] = ()) -> str:
    """Why a prune is refused, by configuration and names alone."""
    index = read_of(config, names)
    with pytest.raises(CheckpointError) as error:
        prune.outputs(index)
    with pytest.raises(CheckpointError):
        prune.config(index)
    return str(error.value)


def read_of(config: dict[str, Any], names: Iterable[str] = ()) -> CheckpointIndex:
    entries = {name: TensorEntry(name, "BF16", (1,), "model.safetensors", 0, 2) for name in names}
    return CheckpointIndex(Path("nowhere"), config, entries)


def glm_config(layers: int = 7, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full"][:layers],
        **changes,
    }


def glm_names(layers: int = 8) -> list[str]:
    return [f"model.layers.{layer}.input_layernorm.weight" for layer in range(layers)]


@pytest.mark.parametrize("family", AS_PUBLISHED)
def test_what_is_pruned_passes_validation_and_was_copied_byte_for_byte(family: str, tmp_path: Path) -> None:
    layers, kinds = AS_PUBLISHED[family]
    source = write_checkpoint(tmp_path / "full", family)
    pruned = applied(Prune(layers), source, tmp_path / "pruned")
    report = inspect(pruned)
    assert report.ok, report.text()
    assert report.facts["num_layers"] == layers
    assert report.facts.get("mtp_layers", 0) == 0
    before, after = tensors_of(source), tensors_of(pruned)
    assert set(after) < set(before), "the first layers keep their numbers"
    for name, tensor in after.items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    config = json.loads((pruned / "config.json").read_text())
    stated = config.get("text_config", config)
    lists = ("compress_ratios", "indexer_types", "local_layer_ids")
    assert next((stated[key] for key in lists if key in stated), None) == kinds
    assert not any("mtp" in name for name in after)


@pytest.mark.parametrize("family", ["deepseek_v4_flash", "glm_moe_dsa_fp8", "inkling"])
def test_mtp_layers_follow_when_they_are_kept(family: str, tmp_path: Path) -> None:
    layers = AS_PUBLISHED[family][0]
    source = write_checkpoint(tmp_path / "full", family)
    before = inspect(source)
    pruned = applied(Prune(layers, mtp="keep"), source, tmp_path / "pruned")
    report = inspect(pruned)
    assert report.ok, report.text()
    assert report.facts["mtp_layers"] == before.facts["mtp_layers"] > 0
    assert not any("MTP" in note for note in report.notes)
    names = tensors_of(pruned)
    assert any(name.startswith(("mtp.0.", "model.layers.5.eh_proj", "model.mtp.layers.0.")) for name in names)


def test_modules_that_stay_unquantised_are_listed_under_their_new_numbers(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "full", "glm_moe_dsa_fp8")
    pruned = applied(Prune((0, 1, 2, 6), mtp="keep"), source, tmp_path / "pruned")
    listed = json.loads((pruned / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.3.mlp.gate" in listed, "layer 6 is now layer 3"
    assert "model.layers.4.eh_proj" in listed, "the MTP layer, 7, is now 4"
    assert not any("layers.5." in name or "layers.6." in name or "layers.7." in name for name in listed)
    assert "lm_head" in listed
    assert inspect(pruned).ok


def model_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.inkling.modeling_inkling import InklingForConditionalGeneration

    whole = "inkling" in json.loads((folder / "config.json").read_text())["model_type"]
    loader: Any = InklingForConditionalGeneration if whole else AutoModelForCausalLM
    model, info = loader.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    missing = [name for name in info["missing_keys"] if "tower" not in name]
    assert not missing, missing
    assert not info["mismatched_keys"]
    return model.eval(), info


def cut(model: Any, keep: tuple[int, ...]) -> Any:
    """The full model without the other layers, by taking its own modules out."""
    body = getattr(model.model, "language_model", model.model)
    body.layers = torch.nn.ModuleList([body.layers[number] for number in keep])
    config = getattr(model.config, "text_config", model.config)
    for holder in {id(c): c for c in (config, body.config)}.values():
        for key in ("layer_types", "mlp_layer_types", "indexer_types"):
            if getattr(holder, key, None) is not None:
                setattr(holder, key, [getattr(holder, key)[number] for number in keep])
        holder.num_hidden_layers = len(keep)
    return model


@pytest.mark.parametrize(
    ("family", "keep"),
    [
        ("deepseek_v4_plain", (0, 1, 2, 3)),
        ("deepseek_v4_plain", (0, 2, 3)),
        ("glm_moe_dsa", (0, 1, 2, 3, 4)),
        ("glm_moe_dsa", (1, 2, 4, 6)),
        ("inkling", (0, 1, 2, 3)),
        ("inkling", (1, 4, 5)),
        ("qwen3_moe", (0, 1, 2, 3, 4)),
        ("qwen3_moe", (2, 5)),
        ("llama_tied", (0, 2)),
    ],
)
def test_a_pruned_checkpoint_loads_in_transformers_and_computes_as_the_full_model_cut_to_these_layers(
    family: str, keep: tuple[int, ...], tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "full", family)
    folder = applied(Prune(keep), source, tmp_path / "pruned")
    assert inspect(folder).ok, inspect(folder).text()
    pruned, info = model_of(folder)
    assert not info["unexpected_keys"]
    tokens = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        full_model, _ = model_of(source)
        full = full_model(tokens, use_cache=False).logits
        got = pruned(tokens, use_cache=False).logits
        want = cut(full_model, keep)(tokens, use_cache=False).logits
    assert torch.equal(got, want)
    assert not torch.allclose(got, full, atol=1e-3), "the layers that went must have mattered"


@pytest.mark.parametrize(
    ("family", "keep"),
    [("deepseek_v4_flash", (0, 1, 2, 3)), ("glm_moe_dsa_fp8", (0, 1, 2, 3, 4)), ("glm_moe_dsa_fp8", (1, 2, 4, 6))],
)
def test_so_does_a_quantised_one_as_transformers_decodes_it(family: str, keep: tuple[int, ...], tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "full", family)
    pruned, _ = model_of(applied(Prune(keep), source, tmp_path / "pruned"), torch.bfloat16)
    full, _ = model_of(source, torch.bfloat16)
    tokens = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = pruned(tokens, use_cache=False).logits
        assert torch.equal(got, cut(full, keep)(tokens, use_cache=False).logits)
    assert bool(got.isfinite().all())


def test_a_prune_of_the_catalogues_models_is_what_the_catalogue_calls_their_pruned_copy() -> None:
    """Real sizes, configuration alone: the numbers of layers and their kinds are those that the recipes expect."""
    for name, count, config in (
        ("deepseek-v4-flash", 4, {"model_type": "deepseek_v4", "num_hidden_layers": 43, "num_nextn_predict_layers": 1}),
        ("glm-5_2", 5, glm_config(78, indexer_types=None)),
    ):
        shape, small = model_shape(name), expectation_of(model_shape(f"{name}-{count}layer")).values
        if shape.compress_ratios:
            config = {**config, "compress_ratios": [*shape.compress_ratios, 0], "num_hash_layers": shape.hash_layers}
            names = [f"layers.{layer}.attn_norm.weight" for layer in range(43)]
        else:
            names = glm_names(79)
        pruned = Prune(count).config(read_of(config, names))
        assert pruned["num_hidden_layers"] == small["num_layers"] == count
        assert pruned["num_nextn_predict_layers"] == small["mtp_layers"] == 0
        if shape.compress_ratios:
            assert tuple(pruned["compress_ratios"]) == small["compress_ratios"]
            assert pruned["num_hash_layers"] == small["hash_layers"]
        else:
            assert pruned["first_k_dense_replace"] == small["dense_layers"] == 3


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_layer_that_shares_an_index_is_not_kept_without_the_layer_that_computes_it() -> None:
    text = refused(Prune((3, 4)), glm_config(), glm_names())
    assert "layer 3 shares the tokens that are chosen by layer 2, which is not kept" in text
    text = refused(Prune((0, 1, 4)), glm_config(), glm_names())
    assert "layer 4 shares the tokens that are chosen by layer 2" in text, "layer 1 is full, but another's leader"
    assert Prune((2, 4)).config(read_of(glm_config(), glm_names()))["indexer_types"] == ["full", "shared"]


def test_where_numbers_move_a_pattern_says_what_engines_would_derive_from_numbers() -> None:
    index = read_of(glm_config(), glm_names())
    assert Prune((0, 1, 2, 3)).config(index).get("index_topk_pattern") is None, "the schedule still holds"
    moved = Prune((2, 4, 6)).config(index)
    assert moved["index_topk_pattern"] == "FSF"
    assert moved["indexer_types"] == ["full", "shared", "full"]


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        (0, "at least one"),
        (8, "below 7"),
        (-1, "at least one"),
        (10**12, "below 7"),
        ((1, 0), "ascending"),
        ((0, 0), "each once"),
        ((0, 7), "below 7"),
    ],
)
def test_layers_that_are_none_of_the_models_are_refused(layers: Any, why: str) -> None:
    assert why in refused(Prune(layers), glm_config(), glm_names())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"indexer_types": ["full"] * 6}, "indexer_types must have 7 entries"),
        ({"mlp_layer_types": "dense"}, "mlp_layer_types must have 7 entries"),
        ({"dspark_target_layer_ids": [1, 3]}, "dspark_target_layer_ids may speak of layers"),
        ({"attention_chunk_layers": 2}, "attention_chunk_layers may speak of layers"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not known"),
        ({"mlp_only_layers": [9]}, "mlp_only_layers must be a list of numbers below 7"),
        ({"model_type": "gpt2"}, "where it keeps its layers is not known"),
        ({"num_hidden_layers": 10**9}, "no model has such numbers"),
        ({"num_nextn_predict_layers": 10**9}, "no model has such numbers"),
    ],
)
def test_what_can_not_be_carried_over_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    assert why in refused(Prune(3), glm_config(**changes), glm_names())


def test_patterns_of_modules_go_with_the_first_layers_only() -> None:
    section = {"quant_method": "fp8", "ignored_layers": [r"re:.*layers\.[0-3]\..*gate", "lm_head"]}
    config = glm_config(quantization_config=section)
    assert Prune(3).config(read_of(config, glm_names()))["quantization_config"] == section
    assert "pattern of layers" in refused(Prune((0, 2)), config, glm_names())


def test_tensors_that_contradict_the_configuration_are_refused_by_name() -> None:
    text = refused(Prune(3), glm_config(), glm_names(9))
    assert "model.layers.8.input_layernorm.weight: config.json has 7 layers" in text
    text = refused(Prune(3), glm_config(), [name for name in glm_names() if ".1." not in name])
    assert "no tensor is called model.layers.1." in text
    text = refused(Prune(3), glm_config(), [*glm_names(), "model.layers.01.input_layernorm.weight"])
    assert "model.layers.01.input_layernorm.weight" in text
    text = refused(Prune(3), glm_config(), [*glm_names(), "model.language_model.layers.0.x"])
    assert "model.language_model.layers.0.x is no model.layers.N" in text


def test_all_reasons_come_at_once() -> None:
    config = glm_config(mlp_layer_types=["dense"], dspark_target_layer_ids=[1])
    text = refused(Prune((3,)), config, glm_names(9))
    for part in ("mlp_layer_types", "dspark_target_layer_ids", "layer 3 shares", "model.layers.8."):
        assert part in text


@pytest.mark.parametrize("family", ["deepseek_v4_flash", "glm_moe_dsa", "inkling", "qwen3_moe"])
@pytest.mark.parametrize("mtp", ["drop", "keep"])
def test_every_choice_of_layers_is_consistent_or_refused_for_its_index_share_group(
    family: str, mtp: Literal["drop", "keep"], tmp_path: Path
) -> None:
    """All subsets, by names and shapes alone: what is left is what its own configuration asks for."""
    source = read_checkpoint(write_checkpoint(tmp_path, family))
    facts = inspect(tmp_path).facts
    layers, num_refused = facts["num_layers"], 0
    for bits in range(1, 2**layers):
        keep = tuple(layer for layer in range(layers) if bits >> layer & 1)
        leaders = {max(n for n in facts.get("index_layers", keep) if n <= layer) for layer in keep}
        prune = Prune(keep, mtp=mtp)
        if not leaders <= set(keep):
            with pytest.raises(CheckpointError, match="index-share"):
                prune.outputs(source)
            num_refused += 1
            continue
        config, groups = prune.config(source), prune.outputs(source)
        left = {t.name: TensorEntry(t.name, t.dtype, t.shape, "f", 0, 1) for group in groups for t in group.tensors}
        problems: list[Any] = []
        layout = read_layout(config, problems)
        assert layout is not None
        expected = expand(layout, problems)
        result = compare(expected, read_scheme(config, expected, left, problems), left)
        assert not [*problems, *result.problems], (keep, [*problems, *result.problems][:3])
        for name in ("compress_ratios",):
            if name in facts:
                assert layout.facts[name] == tuple(facts[name][layer] for layer in keep)
        for name in ("window_layers", "index_layers"):
            if name in facts:
                assert layout.facts[name] == tuple(new for new, old in enumerate(keep) if old in facts[name])
    assert (num_refused > 0) == (family == "glm_moe_dsa")


def test_settings_say_everything_that_the_result_depends_on() -> None:
    assert Prune(4).name == "prune"
    assert Prune(4).settings == {"layers": 4, "mtp": "drop"}
    assert json.loads(json.dumps(Prune((0, 2), mtp="keep").settings)) == {"layers": [0, 2], "mtp": "keep"}
