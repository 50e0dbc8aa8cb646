"""A configuration as a shape: transformers' defaults, both spellings of layer lists, and every refusal at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.config.errors import ConfigError
from lockstep.topology.catalogue import model_shape
from lockstep.topology.shapes import known_model_types, shape_from_config

PLAIN = [name for name in known_model_types() if name != "inkling_mm_model"]


@pytest.mark.parametrize("model_type", PLAIN)
def test_what_a_configuration_leaves_out_is_its_classes_default(model_type: str) -> None:
    from transformers import AutoConfig

    whole = AutoConfig.for_model(model_type).to_dict()
    assert shape_from_config({"model_type": model_type}, "x") == shape_from_config(whole, "x")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("deepseek-v4-flash", {"model_type": "deepseek_v4", "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0]}),
        (
            "glm-5_2",
            {
                "model_type": "glm_moe_dsa",
                "index_topk_freq": 4,
                "index_skip_topk_offset": 3,
                "num_nextn_predict_layers": 1,
            },
        ),
        ("glm-4_7-flash", {"model_type": "glm4_moe_lite", "num_nextn_predict_layers": 1}),
        ("qwen3-30b-a3b", {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128}),
        (
            "inkling",
            {
                "model_type": "inkling_mm_model",
                "text_config": {"dense_mlp_idx": 2, "num_mtp_layers": 8, "local_layer_ids": None},
                "vision_config": {"hidden_size": 1024},
            },
        ),
    ],
)
def test_a_published_configuration_is_its_catalogue_entry(name: str, config: dict[str, Any]) -> None:
    assert shape_from_config(config, name) == replace(model_shape(name), name=name)


def test_the_two_spellings_of_compressed_layers_agree() -> None:
    ratios = [0, 0, 4, 128]
    kinds = ["sliding_attention", "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    base = {"model_type": "deepseek_v4", "num_hidden_layers": 4}
    spelled = [
        shape_from_config({**base, **lists}, "x") for lists in ({"compress_ratios": ratios}, {"layer_types": kinds})
    ]
    assert spelled[0].compress_ratios == tuple(ratios)
    assert spelled[0] == spelled[1]


def test_an_unknown_architecture_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'mamba' are not counted") as error:
        shape_from_config({"model_type": "mamba"}, "x")
    assert "qwen3_moe" in str(error.value)


def test_everything_that_is_not_counted_is_said_at_once() -> None:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": "2048",
        "num_hidden_layers": 0,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
    }
    with pytest.raises(ConfigError) as error:
        shape_from_config(config, "x")
    keys = {violation.key for violation in error.value.violations}
    assert keys == {"hidden_size", "num_hidden_layers", "decoder_sparse_step", "mlp_only_layers", "use_sliding_window"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "inkling_text", "swa_head_dim": 64}, "windowed layers with 64"),
        ({"model_type": "glm_moe_dsa", "mlp_layer_types": ["sparse", "dense"] * 39}, "a dense layer follows"),
        ({"model_type": "glm_moe_dsa", "attention_bias": True}, "biased projections"),
        ({"model_type": "deepseek_v4", "layer_types": ["full_attention"] * 43}, "entries that are not counted"),
        ({"model_type": "deepseek_v4", "compress_ratios": [0, 4]}, "2 entries for 43 layers"),
        ({"model_type": "deepseek_v4", "compress_rate_csa": 8}, "an indexed ratio of 8"),
        ({"model_type": "llama", "mlp_bias": True}, "biased MLPs"),
    ],
)
def test_a_variation_beyond_the_formulas_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from_config(config, "x")
