"""Configuration against a recipe's expectation, and against itself: what disagrees is named with both values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.expectation import Expectation, check_config, expectation_of
from lockstep.checkpoint.expected import read_layout
from lockstep.checkpoint.inspect import Report, inspect
from lockstep.topology.catalogue import model_shape
from tests.published_configs import GLM_5_2, INKLING_SMALL, QWEN3_30B, V4_FLASH
from tests.synthetic_checkpoints import write_checkpoint

CATALOGUE = {
    "glm-5_2": GLM_5_2,
    "deepseek-v4-flash": V4_FLASH,
    "inkling-small": INKLING_SMALL,
    "qwen3-30b-a3b": QWEN3_30B,
}
UNEXPECTED = "config.json is not what the recipe expects"


def report_on(config: dict[str, Any], expectation: Expectation | None, folder: Path) -> Report:
    """A report on a configuration alone: there are no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return inspect(folder, expectation)


def unexpected(report: Report) -> list[str]:
    return [problem.text for problem in report.problems if problem.kind == UNEXPECTED]


@pytest.mark.parametrize("name", CATALOGUE)
def test_published_configurations_are_what_the_catalogue_expects(name: str, tmp_path: Path) -> None:
    report = report_on(CATALOGUE[name], expectation_of(model_shape(name)), tmp_path)
    assert not unexpected(report)
    assert not [problem for problem in report.problems if problem.kind == "config.json is refused"], report.text()


def differing(config: dict[str, Any], expectation: Expectation) -> list[str]:
    """Where a configuration is not what is expected, without a look at any folder."""
    layout = read_layout(config, [])
    problems, _ = check_config(config, {} if layout is None else layout.facts, None, expectation)
    return [problem.text for problem in problems]


def not_in_the_catalogue(name: str, key: str) -> bool:
    """Sizes that ``ModelShape`` has no field for, or that are held against another key."""
    left_out = {
        "inkling-small": ("intermediate_size", "swa_num_attention_heads", "swa_head_dim"),
        "qwen3-30b-a3b": ("intermediate_size",),  # of dense layers, and it has none
        "glm-5_2": ("index_topk_freq", "index_skip_topk_offset"),
    }
    return key in left_out.get(name, ())


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_size_that_differs_from_the_catalogues_is_named_with_both_values(name: str) -> None:
    config, expectation = CATALOGUE[name], expectation_of(model_shape(name))
    section = config.get("text_config", config)
    assert not differing(config, expectation)
    sizes = [key for key, value in section.items() if type(value) is int and not not_in_the_catalogue(name, key)]
    assert len(sizes) > 8
    for key in sizes:
        changed = {**section, key: 2 * section[key] + 2}
        texts = differing({**config, "text_config": changed} if section is not config else changed, expectation)
        assert texts, key
        assert all(" is " in text and ", expected " in text for text in texts)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "llama", "num_key_value_heads": 4}, "model_type is llama, expected qwen3_moe"),
        ({"architectures": ["Qwen3MoeModel"]}, "architectures is ['Qwen3MoeModel'], expected Qwen3MoeForCausalLM"),
        ({"architectures": None}, "architectures is None, expected Qwen3MoeForCausalLM"),
        ({"num_hidden_layers": 47}, "num_layers is 47, expected 48"),
        ({"tie_word_embeddings": True}, "tied_embeddings is True, expected False"),
        ({"rope_theta": 1e4}, "rope_theta is 10000.0, expected 1000000.0"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type is yarn, expected default"),
    ],
)
def test_model_type_architecture_layers_ties_and_rope_are_compared(changes: dict[str, Any], text: str) -> None:
    config = {**QWEN3_30B, "rope_theta": 1e6, **changes}
    base = expectation_of(model_shape("qwen3-30b-a3b"))
    values = {**base.values, "rope_theta": 1e6, "rope_type": "default"}
    expectation = Expectation(model_types=base.model_types, architectures=base.architectures, values=values)
    assert text in differing(config, expectation)


def test_a_pruned_copy_expects_its_own_number_of_layers_and_no_mtp(tmp_path: Path) -> None:
    pruned = {
        **V4_FLASH,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [0, 0, 4, 128],
    }
    small = expectation_of(model_shape("deepseek-v4-flash-4layer"))
    assert not unexpected(report_on(pruned, small, tmp_path))
    with_mtp = {**pruned, "num_nextn_predict_layers": 1, "compress_ratios": [0, 0, 4, 128, 0]}
    assert unexpected(report_on(with_mtp, small, tmp_path)) == ["mtp_layers is 1, expected 0"]
    assert "num_layers is 4, expected 43" in differing(pruned, expectation_of(model_shape("deepseek-v4-flash")))


def test_a_model_whose_mtp_layers_were_dropped_is_still_the_model(tmp_path: Path) -> None:
    config = {**V4_FLASH, "num_nextn_predict_layers": 0, "compress_ratios": V4_FLASH["compress_ratios"][:43]}
    report = report_on(config, expectation_of(model_shape("deepseek-v4-flash")), tmp_path)
    assert not unexpected(report)
    assert "mtp_layers: none, of 1 that the model has" in report.notes


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("llama", "none"),
        ("glm_moe_dsa_fp8", "fp8"),
        ("deepseek_v4_fp8", "fp8"),
        ("deepseek_v4_flash", "mxfp4_experts"),
    ],
)
def test_the_quantisation_is_compared_in_the_words_of_recipes(family: str, scheme: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    assert inspect(tmp_path, Expectation(quantisation=scheme)).ok
    for other in {"none", "fp8", "fp8_ue8m0", "mxfp4_experts"} - {scheme}:
        texts = unexpected(inspect(tmp_path, Expectation(quantisation=other)))
        assert texts == [f"quantisation is {scheme}, expected {other}"]


def test_forbidden_keys_are_found_at_any_depth(tmp_path: Path) -> None:
    config = {**QWEN3_30B, "nested": [{"use_kernel": 1}], "use_kernel": None}
    report = report_on(config, Expectation(forbidden_keys=("use_kernel",)), tmp_path)
    texts = [problem.text for problem in report.problems if problem.kind == "forbidden key"]
    assert texts == ["config.json: use_kernel: remove it", "config.json: nested[0].use_kernel: remove it"]


def test_an_unknown_model_type_is_a_problem_that_lists_the_known_ones(tmp_path: Path) -> None:
    (problem, *_) = [p for p in report_on({"model_type": "gpt2"}, None, tmp_path).problems if "gpt2" in p.text]
    assert "deepseek_v4" in problem.text
    assert "model_type None" in report_on({}, None, tmp_path).text()


@pytest.mark.parametrize(
    ("config", "changes", "text"),
    [
        (GLM_5_2, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 76}, "mlp_layer_types: disagrees with first_k"),
        (GLM_5_2, {"mlp_layer_types": ["dense"] * 78 + ["sparse"]}, "must be a list of 78 entries"),
        (GLM_5_2, {"indexer_types": ["full"] * 78}, "indexer_types: disagrees with index_topk_freq from layer 3"),
        (GLM_5_2, {"indexer_types": ["half"] * 78}, "half is none of full, shared"),
        (GLM_5_2, {"index_topk_pattern": "S" + "F" * 77, "index_topk_freq": None}, "the first layer must be full"),
        (GLM_5_2, {"index_topk_pattern": "FSX"}, "must be 78 letters"),
        (GLM_5_2, {"first_k_dense_replace": None}, "mlp_layer_types: is missing, and so is first_k_dense_replace"),
        (GLM_5_2, {"q_lora_rank": None}, "q_lora_rank: is missing"),
        (GLM_5_2, {"hidden_size": "6144"}, "6144 is no integer"),
        (GLM_5_2, {"hidden_size": True}, "True is no integer"),
        (GLM_5_2, {"hidden_size": 0}, "0 is no integer from 1"),
        (GLM_5_2, {"tie_word_embeddings": "no"}, "neither true nor false"),
        (V4_FLASH, {"compress_ratios": [0] * 42}, "must be a list of 43 entries"),
        (V4_FLASH, {"compress_ratios": [2] * 43}, "2 is none of 0, 4, 128"),
        (V4_FLASH, {"compress_ratios": None}, "compress_ratios: is missing, and so is layer_types"),
        (
            V4_FLASH,
            {"layer_types": ["sliding_attention"] * 43},
            "compress_ratios: disagrees with layer_types from layer 2",
        ),
        (V4_FLASH, {"mlp_layer_types": ["moe"] * 43}, "num_hash_layers: disagrees with mlp_layer_types from layer 0"),
        (V4_FLASH, {"o_groups": 7}, "7 does not divide the 32768 outputs"),
        (V4_FLASH, {"quantization_config": {"quant_method": "gptq"}}, "gptq is not known here"),
        (V4_FLASH, {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "e5m2 is none of e4m3, e4m3fnuz"),
        (V4_FLASH, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "no pair of rows"),
        (
            V4_FLASH,
            {"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "int4"},
            "int4 is none of fp4, fp8",
        ),
        (V4_FLASH, {"quantization_config": []}, "quantization_config: must be an object"),
        (V4_FLASH, {"torch_dtype": "float8"}, "float8 is none of bfloat16"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused_by_key(
    config: dict[str, Any], changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    report = report_on({**config, **changes}, None, tmp_path)
    refused = [problem.text for problem in report.problems if problem.kind == "config.json is refused"]
    assert any(text in line for line in refused), refused


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["hybrid"] * 42}, "layer_types: disagrees with local_layer_ids from layer 0"),
        ({"local_layer_ids": [0, 0]}, "different layer numbers below 42"),
        ({"local_layer_ids": [42]}, "different layer numbers below 42"),
        ({"mlp_layer_types": ["sparse"] * 42}, "mlp_layer_types: disagrees with dense_mlp_idx from layer 0"),
        ({"moe_intermediate_size": 3072}, "3072 is not the experts' width in intermediate_size"),
        ({"swa_head_dim": None}, "text_config.swa_head_dim: is missing"),
    ],
)
def test_inklings_section_is_checked_under_its_name(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    config = {**INKLING_SMALL, "text_config": {**INKLING_SMALL["text_config"], **changes}}
    report = report_on(config, None, tmp_path)
    assert any(text in problem.text and "text_config." in problem.text for problem in report.problems), report.text()


def test_all_of_a_configurations_faults_come_at_once(tmp_path: Path) -> None:
    config = {**GLM_5_2, "hidden_size": None, "vocab_size": -1, "n_routed_experts": 2.5, "mlp_layer_types": ["dense"]}
    report = report_on(config, expectation_of(model_shape("glm-5_2")), tmp_path)
    for key in ("hidden_size", "vocab_size", "n_routed_experts", "mlp_layer_types"):
        assert any(key in problem.text for problem in report.problems), key
