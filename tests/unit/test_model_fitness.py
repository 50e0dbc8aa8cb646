"""What no run can be built on is refused by name before one is: bidirectional models, state in modules, failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.config.schema import RandomModel
from lockstep.model.fitness import refuse_undecodable, refuse_unfit
from lockstep.model.load import ModelError, load_model
from tests.contract.tiny_models import CONFIGS

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_HYBRID: dict[str, Any] = {
    **_GROUPED,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def load(model_type: str, fields: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    return load_model(RandomModel(model_type=model_type, config=fields, seed=1), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("model_type", "fields", "switch"),
    [
        ("bert", _SIZES, "is_decoder = false"),
        ("roberta", _SIZES, "is_decoder = false"),
        ("gemma3_text", _GROUPED | {"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
    ],
)
def test_a_model_that_reads_to_the_right_is_refused(
    model_type: str, fields: dict[str, Any], switch: str, dtype: torch.dtype
) -> None:
    """It loaded as a causal model, and its loss saw the tokens that it predicts."""
    model = load(model_type, fields, dtype)
    with pytest.raises(ModelError, match=rf"reads the tokens to the right .*{switch}.*qwen3"):
        refuse_unfit(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_causal_model_is_fit_and_left_as_it_was(model_type: str, dtype: torch.dtype) -> None:
    model = load(model_type, CONFIGS[model_type], dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refuse_unfit(model)
    refuse_undecodable(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_encoder_that_is_told_to_decode_is_fit() -> None:
    model = load("roberta", _SIZES | {"is_decoder": True})
    refuse_unfit(model)
    refuse_undecodable(model)


def test_state_that_a_forward_leaves_in_a_module_is_refused() -> None:
    fields = _SIZES | {"num_key_value_heads": 1, "head_dim": 8, "lru_width": 32, "attention_window_size": 8}
    with pytest.raises(ModelError, match=r"state of its last forward in .*rg_lru\.recurrent_states"):
        refuse_unfit(load("recurrent_gemma", fields))


def test_a_forward_that_fails_is_told_with_the_model() -> None:
    """Rotary and head sizes that do not fit each other: transformers builds the model."""
    with pytest.raises(ModelError, match=r"DeepseekV2ForCausalLM: its forward of 6 tokens fails \(RuntimeError: The s"):
        refuse_unfit(load("deepseek_v2", _GROUPED))


def test_a_model_that_transformers_can_t_decode_with_a_cache_is_refused() -> None:
    """Linear attention in every layer: transformers finds no length in its cache."""
    model = load("qwen3_5_text", _HYBRID)
    refuse_unfit(model)
    with pytest.raises(ModelError, match=r"decoding with a cache fails for it .*correct its configuration"):
        refuse_undecodable(model)
