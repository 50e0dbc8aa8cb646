"""Body and head apart give the model's own logits, also where its body has an output type of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.model.adapter import SplitModel
from lockstep.model.load import ModelError
from lockstep.rollout import cache_rows

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

STATE_SPACE: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
    },
    "bamba": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
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


@pytest.mark.parametrize("model_type", STATE_SPACE)
def test_a_state_space_model_decodes_from_its_state_what_it_computes_over_the_whole(model_type: str) -> None:
    """Mamba's body takes its state as ``cache_params``; under another name it swallows it and forgets the prompt.
    Bamba's, a hybrid, counts positions from 0 again unless it is told them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=97, pad_token_id=0, **STATE_SPACE[model_type])
    model = AutoModelForCausalLM.from_config(config).eval()
    split, ids = SplitModel(model), torch.randint(3, 97, (2, 12))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        whole, cache = split.hidden(ids), split.new_cache()
        parts = [split.hidden(ids[:, :7], cache=cache)]
        cache = cache_rows.joined([cache_rows.rows_of(cache, [row]) for row in (0, 1)])  # as a cohort is put together
        parts += [split.hidden(ids[:, [at]], cache=cache) for at in range(7, 12)]
        forgetful = torch.cat([split.hidden(ids[:, [at]]) for at in range(7, 12)], dim=1)
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-4)
    assert not torch.allclose(forgetful, whole[:, 7:], atol=0.1), "what came before matters"


@pytest.mark.parametrize(
    ("model_type", "fields", "told"),
    [
        (
            "xlstm",
            {"hidden_size": 64, "num_hidden_layers": 1, "num_heads": 4},
            "xLSTMModel takes xLSTMCache as cache_p",
        ),
        ("openai-gpt", {"n_embd": 32, "n_layer": 1, "n_head": 2}, "OpenAIGPTModel takes no cache"),
        (
            "rwkv",
            {"hidden_size": 32, "num_hidden_layers": 2},
            "RwkvForCausalLM has no body under a language-model head",
        ),
        ("xlnet", {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}, "XLNetLMHeadModel has no body"),
        ("xlm", {"emb_dim": 32, "n_layers": 1, "n_heads": 2}, "XLMWithLMHeadModel has no body"),
        (
            "minimax",
            {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "intermediate_size": 32,
                "num_local_experts": 2,
            },
            "MiniMaxModel takes MiniMaxCache as past_key_values",
        ),
    ],
)
def test_a_model_whose_state_is_no_cache_of_transformers_is_refused_by_name(
    model_type: str, fields: dict[str, Any], told: str
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, vocab_size=97, **fields))
    with pytest.raises(ModelError, match=told):
        SplitModel(model)
