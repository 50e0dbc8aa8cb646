"""In how many bits a checkpoint's weights are, by its configuration, its name, or as it was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.driver.launch_commands import LaunchVerdict, plan_launch
from lockstep.topology.launch_precision import precision_by_config, precision_by_name, published

INT4_GROUP = {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}
FP8_GROUP = {"weights": {"num_bits": 8, "type": "float"}}


@pytest.mark.parametrize(
    ("block", "precision"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "fp8_ue8m0"),
        ({"quant_method": "mxfp4"}, "mxfp4_experts"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": INT4_GROUP}}, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": FP8_GROUP}}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
    ],
)
def test_a_configuration_says_in_how_many_bits_weights_are(block: dict[str, Any], precision: str) -> None:
    read = precision_by_config({"model_type": "qwen3_moe", "quantization_config": block})
    assert read is not None
    assert read[0] == precision
    assert bool(read[1]) == (precision not in ("fp8", "fp8_ue8m0"))


@pytest.mark.parametrize(
    "block",
    [
        {"quant_method": "gptq", "bits": 8},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "of_tomorrow"},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}},
    ],
)
def test_a_method_that_is_not_known_is_told_and_counted_in_sixteen_bits(block: dict[str, Any]) -> None:
    read = precision_by_config({"quantization_config": block})
    assert read is not None
    assert read[0] == "none"
    assert f"quant_method {block['quant_method']} is not known here, so weights are counted in 16 bits" in read[1][0]


def test_experts_in_four_bits_beside_fp8_linears() -> None:
    read = precision_by_config({"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}})
    assert read is not None
    assert read[0] == "mxfp4_experts"
    assert precision_by_config({}) is None


@pytest.mark.parametrize(
    ("path", "precision"),
    [("a/Qwen3-30B-A3B-FP8", "fp8"), ("a/Kimi-K2-int4", "int4"), ("a/DeepSeek-V4-Flash-bf16", "none"), ("a/b", None)],
)
def test_a_name_says_it_or_nothing(path: str, precision: str | None) -> None:
    read = precision_by_name(path)
    assert (None if read is None else read[0]) == precision


def served(tmp_path: Path, arguments: str) -> LaunchVerdict:
    script = tmp_path / "serve.sh"
    script.write_text(f"vllm serve {arguments}\n")
    (verdict,) = plan_launch(script, hardware="h200").verdicts
    return verdict


def weights(verdict: LaunchVerdict) -> float:
    assert verdict.plan is not None
    items = [item for phase in verdict.plan.phases for item in phase.items if item.name == "weights"]
    return max(item.num_bytes for item in items) / 1e9


def test_four_bits_without_a_word_in_the_name(tmp_path: Path) -> None:
    """The folder's name says nothing: its configuration does."""
    folder = tmp_path / "policy"
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    whole = weights(served(tmp_path, str(folder)))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    verdict = served(tmp_path, str(folder))
    assert verdict.launch.job is not None
    assert verdict.launch.job.engine is not None
    assert verdict.launch.job.engine.quantisation == "int4"
    assert weights(verdict) < 0.5 * whole
    assert any("config.json: gptq weights are counted at four bits" in text for text in verdict.launch.assumptions)


def test_a_model_that_is_published_in_four_bits_is_counted_so(tmp_path: Path) -> None:
    """DeepSeek-V4-Flash's own repository: 568 GB in bf16 did not fit two H200, where it is served."""
    verdict = served(tmp_path, "deepseek-ai/DeepSeek-V4-Flash --tensor-parallel-size 2 --enable-expert-parallel")
    assert verdict.legal, verdict.findings
    assert weights(verdict) == pytest.approx(284.3 / 2 * 0.53, rel=0.15)
    assert "weights as published (mxfp4_experts), for neither the path nor a config.json says otherwise" in (
        verdict.launch.assumptions
    )
    base = served(tmp_path, "deepseek-ai/DeepSeek-V4-Flash-Base -tp 4 --enable-expert-parallel").launch.job
    assert base is not None
    assert base.engine is not None
    assert base.engine.quantisation == "fp8"
    own = served(tmp_path, "/data/DeepSeek-V4-Flash-bf16 --tensor-parallel-size 2 --enable-expert-parallel")
    assert not own.legal


@pytest.mark.parametrize(
    ("path", "precision"),
    [
        ("deepseek-ai/DeepSeek-V3-0324", "fp8"),
        ("deepseek-ai/DeepSeek-V3.1", "fp8_ue8m0"),
        ("deepseek-ai/DeepSeek-R1", "fp8"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "none"),
        ("moonshotai/Kimi-K2-Thinking/", "int4"),
        ("moonshotai/Kimi-K2-Instruct-0905", "fp8"),
        ("openai/gpt-oss-120b", "mxfp4_experts"),
        ("MiniMaxAI/MiniMax-M2", "fp8"),
        ("Qwen/Qwen3-30B-A3B", "none"),
    ],
)
def test_public_repositories_in_few_bits_without_a_word_in_their_names(path: str, precision: str) -> None:
    assert precision_by_name(path) is None
    assert published(path)[0] == precision
