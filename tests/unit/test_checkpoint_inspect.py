"""Validation: sound checkpoints of every family pass, and any one thing that is wrong with them is found by name.

The lists of expected tensors are held against numbers that others published of the real files, against what
transformers saves, and against the tables by which refits rename tensors, which were written apart from them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.checkpoint.convert import Dequantise, Quantise
from lockstep.checkpoint.expected import read_layout
from lockstep.checkpoint.expected.quantised import Stored, read_scheme, stored
from lockstep.checkpoint.expected.rows import expand
from lockstep.checkpoint.headers import DTYPE_BITS, read_checkpoint
from lockstep.checkpoint.inspect import Report, inspect
from lockstep.checkpoint.records import TensorEntry
from lockstep.checkpoint.weights import compare
from lockstep.model.weights import ModelWeights
from lockstep.refit.names import as_checkpoint
from tests.contract.tiny_models import tiny_model
from tests.published_configs import GLM_5_2, INKLING_SMALL, QWEN3_30B
from tests.synthetic_checkpoints import FAMILIES, make_checkpoint, write_checkpoint, write_files

QUANTISATION = {
    "glm_moe_dsa_fp8": "fp8",
    "deepseek_v4_flash": "mxfp4_experts",
    "deepseek_v4_fp8": "fp8",
}


def wanted(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry] | None = None) -> dict[str, Stored]:
    """Every tensor that a configuration asks for."""
    problems: list[Any] = []
    layout = read_layout(config, problems)
    assert layout is not None, problems
    expected = expand(layout, problems)
    scheme = read_scheme(config, expected, tensors or {}, problems)
    assert not problems
    return {item.name: item for tensor in expected.values() for item in stored(scheme, tensor)}


def elements(items: Iterator[Stored] | list[Stored]) -> int:
    return sum(math.prod(item.shape or ()) for item in items)


def num_bytes(item: Stored) -> int:
    return math.prod(item.shape or ()) * DTYPE_BITS[item.dtypes[0]] // 8


def of_dtype(items: Mapping[str, Stored], dtype: str) -> list[Stored]:
    return [item for item in items.values() if item.dtypes[0] == dtype]


def problems_of(report: Report) -> list[str]:
    return [f"{problem.kind}: {problem.text}" for problem in report.problems]


def rewritten(folder: Path, change: Any) -> Path:
    """A checkpoint with ``change(config, tensors)`` applied, as three files anew."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    change(config, tensors)
    for file in folder.glob("model*"):
        file.unlink()
    return write_files(folder, config, tensors)


# --- sound ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_checkpoint_in_its_published_layout_has_no_problems(family: str, num_shards: int, tmp_path: Path) -> None:
    report = inspect(write_checkpoint(tmp_path, family, num_shards=num_shards))
    assert report.ok, report.text()
    assert report.quantisation == QUANTISATION.get(family, "none")
    assert report.checked().tensors.keys() == read_checkpoint(tmp_path).tensors.keys()
    assert report.sampled_bytes == report.num_bytes, "small enough to be looked at whole"
    assert "no problems" in report.text()
    assert json.loads(json.dumps(report.as_json()))["ok"] is True


def test_the_towers_of_the_whole_model_are_expected_when_they_are_there(tmp_path: Path) -> None:
    report = inspect(write_checkpoint(tmp_path, "inkling", towers=True))
    assert report.ok, report.text()
    assert not report.notes
    rewritten(tmp_path, lambda _, tensors: tensors.pop("model.visual.layers.norm_1.weight"))
    assert problems_of(inspect(tmp_path)) == ["missing tensor: model.visual.layers.norm_1.weight: BF16 or F32 [320]"]


# --- published numbers ------------------------------------------------------------------------------------------------

V4_PRO: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hc_mult": 4,
    "head_dim": 512,
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 61,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 16,
    "o_lora_rank": 1024,
    "q_lora_rank": 1536,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
"""deepseek-ai/DeepSeek-V4-Pro, config.json, what concerns tensors; ``expert_dtype`` is not in it."""


def flagged(*entries: tuple[str, str]) -> dict[str, TensorEntry]:
    """Tensors by which a checkpoint answers what its configuration leaves open."""
    return {name: TensorEntry(name, dtype, (1,), "x", 0, 1) for name, dtype in entries}


def test_deepseek_v4_pro_has_the_published_number_of_tensors_and_elements() -> None:
    answers = flagged(("layers.0.attn.wq_a.scale", "F8_E8M0"), ("layers.0.ffn.experts.0.w1.weight", "I8"))
    items = wanted(V4_PRO, answers)
    assert len(items) == 145_116
    assert elements(list(items.values())) == 861_608_274_846
    assert items["layers.60.ffn.experts.383.w2.weight"].shape == (7168, 1536)
    assert items["layers.60.ffn.experts.383.w2.scale"].shape == (7168, 96)
    assert items["layers.7.attn.compressor.ape"].shape == (128, 512)
    assert items["layers.8.attn.indexer.compressor.ape"].shape == (4, 256)
    assert items["mtp.0.attn.wo_a.scale"].shape == (128, 32)
    assert sum(name.endswith("tid2eid") for name in items) == 3
    assert sum(name.endswith("gate.bias") for name in items) == 59


def test_glm_5_2_fp8_has_the_published_number_of_tensors_and_elements_of_each_dtype() -> None:
    layers = {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "dtype": "bfloat16"}
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    items = wanted({**GLM_5_2, **layers, "quantization_config": fp8})
    assert len(items) == 118_629
    assert elements(of_dtype(items, "F8_E4M3")) == 751_226_191_872
    bias = [item for name, item in items.items() if name.endswith("e_score_correction_bias")]
    assert elements(of_dtype(items, "BF16")) - elements(bias) == 2_103_729_152
    assert elements(of_dtype(items, "F32")) + elements(bias) == 45_872_560, "the biases are float32 there"
    assert sum(name.startswith("model.layers.78.") for name in items) == 1569


def inkling_small() -> dict[str, Any]:
    return {
        **INKLING_SMALL,
        "text_config": {**INKLING_SMALL["text_config"], "torch_dtype": "bfloat16"},
        "audio_config": {"n_mel_bins": 80, "mel_vocab_size": 16},
        "vision_config": {"patch_size": 40, "temporal_patch_size": 2, "n_channels": 3, "n_layers": 4},
    }


def test_inkling_small_has_the_published_number_of_tensors_and_bytes() -> None:
    """Of the NVFP4 release: its index, and the same with each of 39 layers' expert stacks in bfloat16."""
    items = wanted(inkling_small())
    packed = [f"model.llm.layers.{n}.mlp.experts.{w}_weight" for n in range(3, 42) for w in ("w13", "w2")]
    assert len(items) + 4 * len(packed) == 1360, "four tensors beside each packed one"
    mtp = [item for name, item in items.items() if name.startswith("model.mtp.")]
    assert len(mtp) == 160
    assert sum(num_bytes(item) for item in mtp) == 4_463_824_912
    total = sum(num_bytes(item) for item in items.values())
    for name in packed:
        count = elements([items[name]])
        total += count // 2 + count // 16 + 4 * 256 + 2 + 3 * 8 - 2 * count
    # Router biases and scales are float32 there.
    total += 40 * (256 + 1) * 2
    assert total == 170_733_074_592


@pytest.mark.parametrize(
    ("config", "tensors", "parameters"),
    [
        (
            QWEN3_30B,
            18_867,
            30_532_122_624,
        ),
        (
            {
                "model_type": "llama",
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "tie_word_embeddings": True,
            },
            146,
            1_235_814_400,
        ),
    ],
    ids=["Qwen3-30B-A3B", "Llama-3.2-1B"],
)
def test_other_models_have_the_published_numbers(config: dict[str, Any], tensors: int, parameters: int) -> None:
    items = wanted(config)
    assert (len(items), elements(list(items.values()))) == (tensors, parameters)


# --- independent witnesses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm_moe_dsa"])
def test_what_transformers_saves_has_no_problems(model_type: str, tmp_path: Path) -> None:
    tiny_model(model_type, torch.bfloat16).save_pretrained(tmp_path)
    report = inspect(tmp_path)
    assert report.ok, report.text()


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "glm_moe_dsa", "deepseek_v4", "inkling_text"])
def test_names_and_shapes_are_those_under_which_refits_send_weights(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    tensors = {name: tensor.contiguous() for name, _, _, tensor in as_checkpoint(ModelWeights(model, 0)).shards()}
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    report = inspect(tmp_path)
    assert report.ok, report.text()


def carried_out(transform: Any, source: Path, target: Path) -> Path:
    """A stage in the plainest way: everything in memory, written by safetensors."""
    index = read_checkpoint(source)
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    made: dict[str, torch.Tensor] = {}
    for group in transform.outputs(index):
        copied = all(tensor.verbatim for tensor in group.tensors)
        made |= {t.name: tensors[t.sources[0]] for t in group.tensors} if copied else {}
        made |= {} if copied else transform.make(group, lambda name: tensors[name])
    return write_files(target, transform.config(index), made)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe", "glm_moe_dsa", "deepseek_v4_plain"])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_ue8m0", "mxfp4_experts"])
def test_what_the_converter_writes_is_what_the_lists_expect_and_so_is_the_way_back(
    family: str, scheme: Any, tmp_path: Path
) -> None:
    if family == "llama_tied" and scheme == "mxfp4_experts":
        return  # it has no experts
    source = write_checkpoint(tmp_path / "source", family)
    quantised = inspect(carried_out(Quantise(scheme), source, tmp_path / "quantised"))
    assert quantised.ok, quantised.text()
    assert quantised.quantisation == scheme
    plain = inspect(carried_out(Dequantise(), tmp_path / "quantised", tmp_path / "plain"))
    assert plain.ok, plain.text()
    assert plain.quantisation == "none"


def test_codes_of_the_other_fp8_are_only_what_the_configuration_says(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "glm_moe_dsa_fp8")

    def other(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["quantization_config"]["fmt"] = "e4m3fnuz"
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float8_e4m3fn:
                tensors[name] = tensor.view(torch.uint8).view(torch.float8_e4m3fnuz)

    rewritten(tmp_path, lambda config, _: config["quantization_config"].update(fmt="e4m3fnuz"))
    assert "F8_E4M3 [32, 64], expected F8_E4M3FNUZ" in inspect(tmp_path).text()
    rewritten(tmp_path, other)
    wrong = {problem.kind for problem in inspect(tmp_path).problems}
    assert wrong <= {"values are wrong"}, "0x80, minus zero in e4m3fn, is NaN in e4m3fnuz"
    rewritten(tmp_path, lambda config, _: config["quantization_config"].update(fmt="e4m3"))
    assert "F8_E4M3FNUZ [32, 64], expected F8_E4M3 [" in inspect(tmp_path).text()


# --- one thing wrong --------------------------------------------------------------------------------------------------


def unchanged(family: str) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    config, tensors = make_checkpoint(family)
    words = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.int8: "I8"}
    words |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"}
    return config, {n: TensorEntry(n, words[t.dtype], tuple(t.shape), "f", 0, 1) for n, t in tensors.items()}


def one_of_each_kind(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """The first and the last tensor of those whose names differ in numbers alone."""
    kinds: dict[str, list[str]] = {}
    for name in tensors:
        kinds.setdefault(re.sub(r"\d+", "N", name), []).append(name)
    return list(dict.fromkeys(name for names in kinds.values() for name in (names[0], names[-1])))


def compared(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> list[str]:
    problems: list[Any] = []
    layout = read_layout(config, problems)
    assert layout is not None
    expected = expand(layout, problems)
    scheme = read_scheme(config, expected, tensors, problems)
    return [problem.text for problem in (*problems, *compare(expected, scheme, tensors).problems)]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_that_goes_missing_is_named(family: str) -> None:
    config, tensors = unchanged(family)
    assert not compared(config, tensors)
    for name in one_of_each_kind(tensors):
        texts = compared(config, {other: entry for other, entry in tensors.items() if other != name})
        assert any(text.startswith(f"{name}: ") for text in texts), name


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_of_another_shape_or_dtype_or_twice_is_named(family: str) -> None:
    config, tensors = unchanged(family)
    for name in one_of_each_kind(tensors):
        entry = tensors[name]
        longer = TensorEntry(name, entry.dtype, (*entry.shape[:-1], entry.shape[-1] + 1), "f", 0, 1)
        other = TensorEntry(name, "F16" if entry.dtype != "F16" else "BF16", entry.shape, "f", 0, 1)
        double = TensorEntry(f"{name}.copy", entry.dtype, entry.shape, "f", 0, 1)
        for changed in (longer, other, double):
            texts = compared(config, {**tensors, changed.name: changed})
            assert any(text.startswith(f"{changed.name}: ") for text in texts), (name, changed)


@pytest.mark.parametrize("family", ["glm_moe_dsa_fp8", "deepseek_v4_flash", "deepseek_v4_fp8"])
def test_scales_and_weights_that_lost_each_other_are_named(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    weight = next(n for n, e in read_checkpoint(tmp_path).tensors.items() if e.dtype == "F8_E4M3" and "wq_b" in n)
    scale = weight.removesuffix(".weight") + (".scale" if family.endswith("flash") else ".weight_scale_inv")
    rewritten(tmp_path, lambda _, tensors: tensors.pop(scale))
    (text,) = problems_of(inspect(tmp_path))
    assert text.startswith(f"missing scales: {scale}: ")
    assert weight in text

    def dequantised(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        tensors[weight] = tensors[weight].to(torch.bfloat16)

    rewritten(tmp_path, dequantised)
    text = inspect(tmp_path).text()
    assert f"{weight}: BF16" in text
    assert "must be in quantization_config.modules_to_not_convert" in text

    def excluded(config: dict[str, Any], _: Any) -> None:
        config["quantization_config"].setdefault("modules_to_not_convert", []).append(weight.removesuffix(".weight"))

    rewritten(tmp_path, excluded)
    assert inspect(tmp_path).ok, inspect(tmp_path).text()
    rewritten(tmp_path, lambda _, tensors: tensors.update({scale: torch.ones(1, 1)}))
    (text,) = problems_of(inspect(tmp_path))
    assert text.startswith(f"scales without a weight: {scale}")


def test_a_weight_without_quantisation_section_is_not_taken_for_quantised(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v4_flash")
    rewritten(tmp_path, lambda config, _: config.pop("quantization_config"))
    text = inspect(tmp_path).text()
    assert "layers.0.attn.wq_a.weight: F8_E4M3 [64, 192], expected BF16 [64, 192]" in text
    assert "scales without a weight" in text


def test_a_tied_head_that_is_stored_again_must_be_its_embedding(tmp_path: Path) -> None:
    """vllm-project/vllm#51665: a tied head that was stored as well did not follow its embedding (C18). Published
    checkpoints do store it (Qwen3-0.6B), equal to the last byte."""
    write_checkpoint(tmp_path, "llama_tied")

    def store(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    report = inspect(rewritten(tmp_path, store))
    assert report.ok, report.text()
    assert report.notes == (
        "lm_head.weight is stored beside model.embed_tokens.weight, which it is by config.json; they are equal",
    )
    rewritten(tmp_path, lambda _, tensors: poison(tensors["lm_head.weight"], b"\x01\x3c"))
    (text,) = problems_of(inspect(tmp_path))
    assert text.startswith("tied tensors differ: lm_head.weight differs from model.embed_tokens.weight")
    assert "not compared" in inspect(tmp_path, sample_bytes=0).notes[0]
    rewritten(tmp_path, lambda config, _: config.update(tie_word_embeddings=False))
    assert inspect(tmp_path).ok
    rewritten(tmp_path, lambda config, _: config.update(tie_word_embeddings=True))
    rewritten(tmp_path, lambda _, tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:98].clone()}))
    (text,) = problems_of(inspect(tmp_path))
    assert "tie_word_embeddings says that the embedding is the head" in text


def test_rotary_tables_of_early_llama_checkpoints_are_a_note(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    table = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(8) for n in range(3)}
    report = inspect(rewritten(tmp_path, lambda _, tensors: tensors.update(table)))
    assert report.ok
    assert report.notes[0].startswith("3 tables that no loader reads")


def test_experts_in_one_stack_are_not_taken_for_experts_of_their_own(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#5844: stacked expert keys where others were expected were ignored, and the experts random
    (C4). Here each expert that is not there is named, and each stack that nobody reads."""
    write_checkpoint(tmp_path, "qwen3_moe")

    def stack(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        at = "model.layers.2.mlp.experts."
        parts = [[tensors.pop(f"{at}{e}.{w}_proj.weight") for w in ("gate", "up", "down")] for e in range(4)]
        tensors[f"{at}gate_up_proj"] = torch.stack([torch.cat(part[:2]) for part in parts])
        tensors[f"{at}down_proj"] = torch.stack([part[2] for part in parts])

    texts = problems_of(inspect(rewritten(tmp_path, stack)))
    assert sum(text.startswith("missing tensor: model.layers.2.mlp.experts.") for text in texts) == 12
    assert sum(text.startswith("tensor left over: model.layers.2.mlp.experts.") for text in texts) == 2


def test_quantised_tensors_under_packed_names_are_a_failure_and_no_warning(tmp_path: Path) -> None:
    """sgl-project/sglang#33245: inputs of a fused projection were known by suffix, packed quantised names fell through
    with a warning, and the server answered nonsense (C26)."""
    write_checkpoint(tmp_path, "glm_moe_dsa_fp8")

    def pack(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.4.self_attn.q_a_proj.weight" in name]:
            tensors[name.replace(".weight", ".weight_packed", 1)] = tensors.pop(name)

    texts = problems_of(inspect(rewritten(tmp_path, pack)))
    at = "model.layers.4.self_attn.q_a_proj"
    kinds = ("missing tensor", "missing scales", "tensor left over", "tensor left over")
    names = (f"{at}.weight:", f"{at}.weight_scale_inv:", f"{at}.weight_packed:", f"{at}.weight_packed_scale_inv:")
    for kind, name in zip(kinds, names, strict=True):
        assert any(text.startswith(f"{kind}: {name}") for text in texts), (kind, name, texts)


@pytest.mark.parametrize(("change", "kind"), [(+1, "missing tensor"), (-1, "tensor left over")])
def test_a_layer_more_or_less_than_configured_is_reported_in_both_directions(
    change: int, kind: str, tmp_path: Path
) -> None:
    """pytorch/pytorch#148252: a bigger checkpoint went into a smaller model in silence (G17)."""
    write_checkpoint(tmp_path, "llama")
    rewritten(tmp_path, lambda config, _: config.update(num_hidden_layers=3 + change))
    layer = 3 if change > 0 else 2
    texts = problems_of(inspect(tmp_path))
    assert len(texts) == 9
    assert all(text.startswith(f"{kind}: model.layers.{layer}.") for text in texts)


def test_an_embedding_with_rows_of_padding_is_refused(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#625: an export kept the rows by which a vocabulary had been padded (C25)."""
    write_checkpoint(tmp_path, "llama")

    def pad(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], torch.zeros(29, 64, dtype=torch.bfloat16)])

    texts = problems_of(inspect(rewritten(tmp_path, pad)))
    assert "wrong shape: model.embed_tokens.weight: BF16 [128, 64], expected BF16 or F32 [99, 64]" in texts
    assert len(texts) == 2


@pytest.mark.parametrize("family", ["deepseek_v4_flash", "glm_moe_dsa", "inkling"])
def test_mtp_layers_may_be_absent_as_a_whole_and_not_in_part(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    at = {"deepseek_v4_flash": "mtp.", "glm_moe_dsa": "model.layers.7.", "inkling": "model.mtp."}[family]
    own = [name for name in read_checkpoint(tmp_path).tensors if name.startswith(at)]

    rewritten(tmp_path, lambda _, tensors: [tensors.pop(name) for name in own[1:]])
    assert len(inspect(tmp_path).problems) == len(own) - 1
    rewritten(tmp_path, lambda _, tensors: tensors.pop(own[0]))
    report = inspect(tmp_path)
    assert report.ok, report.text()
    assert any(f"none of their {len(own)} tensors" in note for note in report.notes)


# --- values -----------------------------------------------------------------------------------------------------------


def poison(tensor: torch.Tensor, pattern: bytes) -> None:
    """Overwrite the last element's bytes."""
    flat = tensor.view(torch.uint8).reshape(-1)
    flat[-len(pattern) :] = torch.tensor(list(pattern), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("family", "name", "pattern", "why"),
    [
        ("llama", "lm_head.weight", b"\xc0\x7f", "not finite"),
        ("llama", "lm_head.weight", b"\x80\xff", "not finite"),
        ("glm_moe_dsa", "model.layers.3.mlp.gate.e_score_correction_bias", b"\0\0\x80\x7f", "not finite"),
        ("glm_moe_dsa_fp8", "model.layers.3.self_attn.q_a_proj.weight", b"\x7f", "not finite"),
        ("glm_moe_dsa_fp8", "model.layers.3.self_attn.q_a_proj.weight", b"\xff", "not finite"),
        ("glm_moe_dsa_fp8", "model.layers.3.self_attn.q_a_proj.weight_scale_inv", bytes(4), "not positive"),
        ("glm_moe_dsa_fp8", "model.layers.3.self_attn.q_a_proj.weight_scale_inv", b"\0\0\x80\xbf", "not positive"),
        ("glm_moe_dsa_fp8", "model.layers.3.self_attn.q_a_proj.weight_scale_inv", b"\0\0\xc0\x7f", "not finite"),
        ("deepseek_v4_flash", "layers.1.attn.wq_a.scale", b"\xff", "not finite"),
        ("deepseek_v4_flash", "layers.1.ffn.experts.2.w3.scale", b"\xff", "not finite"),
        ("deepseek_v4_flash", "layers.1.ffn.gate.tid2eid", b"\x04" + bytes(7), "outside [0, 4)"),
        ("deepseek_v4_flash", "layers.1.ffn.gate.tid2eid", b"\xff" * 8, "outside [0, 4)"),
    ],
)
def test_values_that_are_none_are_found_in_every_dtype(
    family: str, name: str, pattern: bytes, why: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, family)
    rewritten(tmp_path, lambda _, tensors: poison(tensors[name], pattern))
    (text,) = problems_of(inspect(tmp_path))
    assert text.startswith(f"values are wrong: {name} (model-")
    assert why in text
    assert inspect(tmp_path, sample_bytes=0).ok, "the headers are sound"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e5m2, torch.bfloat16, torch.float32])
def test_infinities_and_nan_are_told_by_bits_as_torch_tells_them(dtype: torch.dtype) -> None:
    from lockstep.checkpoint.values import Judged, fault

    word = {torch.float16: "F16", torch.float64: "F64", torch.float8_e5m2: "F8_E5M2", torch.bfloat16: "BF16"}
    entry = TensorEntry("x", word.get(dtype, "F32"), (1,), "f", 0, 1)
    raw = torch.randint(256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    numbers = raw.view(dtype)
    broken = int((~torch.isfinite(numbers.double())).sum())
    assert broken > 0
    assert fault(Judged(entry), raw.numpy().tobytes()) == f"{broken} of {len(numbers)} sampled values are not finite"


def test_a_large_checkpoint_is_sampled_within_the_budget_at_both_ends(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", vocab_size=20_000, num_hidden_layers=8)
    whole = inspect(tmp_path)
    part = inspect(tmp_path, sample_bytes=300_000)
    assert part.ok
    assert 100_000 < part.sampled_bytes <= 400_000 < whole.num_bytes
    few = inspect(tmp_path, sample_bytes=20_000)
    assert 0 < few.sampled_bytes <= 30_000
    rewritten(tmp_path, lambda _, tensors: poison(tensors["lm_head.weight"], b"\xc0\x7f"))
    assert "lm_head.weight" in inspect(tmp_path, sample_bytes=2_000_000).text()


# --- reports ----------------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_in_one_report_of_bounded_length(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", num_experts=64)

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "down_proj" in name]:
            tensors[name + ".old"] = tensors.pop(name)
        tensors["model.norm.weight"] = torch.ones(63, dtype=torch.bfloat16)
        tensors["model.layers.0.mlp.gate.weight"] = torch.full((64, 64), float("nan"), dtype=torch.bfloat16)
        config["auto_map"] = {"AutoModel": "x.Y"}

    report = inspect(rewritten(tmp_path, change))
    kinds = {problem.kind for problem in report.problems}
    both = {"missing tensor", "tensor left over", "wrong shape", "values are wrong", "code in the checkpoint"}
    assert kinds == both
    assert len(report.problems) == 2 * 6 * 64 + 3
    assert len(report.text().splitlines()) < 40
    assert "… and 379 more" in report.text()
    assert len(report.as_json()["problems"]) == len(report.problems)
