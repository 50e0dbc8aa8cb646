"""Body and head apart give the model's own logits, also where its body has an output type of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.model.adapter import SplitModel
from lockstep.model.load import ModelError

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "gpt_neox": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
    },
    "gemma2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    },
}


@pytest.mark.parametrize("model_type", SIZES)
def test_the_head_on_the_bodys_states_gives_the_models_own_logits(model_type: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=97, pad_token_id=0, **SIZES[model_type])
    model = AutoModelForCausalLM.from_config(config).eval()
    split, ids = SplitModel(model), torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0]
        found = split.logits(split.hidden(ids)[0])
        assert torch.allclose(found, expected, atol=1e-5)
        assert expected.std() > 0
        assert torch.equal(model(input_ids=ids).logits[0], expected), "the body is itself again"


def test_a_model_whose_head_asks_another_module_is_refused_instead_of_giving_other_logits() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("opt", vocab_size=97, pad_token_id=0, **SIZES["opt"])
    split = SplitModel(AutoModelForCausalLM.from_config(config).eval())
    split.body = split.model.base_model  # the head calls its decoder
    with pytest.raises(ModelError, match="called it 0 times"):
        split.logits(torch.zeros(2, 32))
