"""Chunked log-probs and their gradients against float64 autograd over full logits."""

from __future__ import annotations

import pytest
import torch

from lockstep.config.schema import RandomModel
from lockstep.model.adapter import SplitModel
from lockstep.model.load import load_model
from lockstep.train import token_logprobs
from lockstep.train.token_logprobs import TokenLogProbs

FIELDS = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def split_model(dtype: torch.dtype = torch.float32, **fields: object) -> SplitModel:
    source = RandomModel(model_type="llama", config={**FIELDS, "initializer_range": 0.3, **fields}, seed=1)
    return SplitModel(load_model(source, dtype))


def inputs(num_rows: int = 37, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Hidden rows, rows with none, one or several tokens, the tokens, and a weight per token."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(num_rows, 32, generator=generator).to(dtype)
    rows = torch.randint(0, num_rows, (60,), generator=generator).sort().values
    tokens = torch.randint(0, 90, (60,), generator=generator)
    return hidden, rows, tokens, torch.randn(60, generator=generator)


def naive(split: SplitModel, temperature: float, limit: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, rows, tokens, weights = inputs()
    hidden = hidden.double().requires_grad_()
    head = split.model.lm_head.weight.detach().double().requires_grad_()
    table = torch.log_softmax((hidden @ head.T)[:, :limit] / temperature, -1)
    values = table[rows, tokens]
    (values * weights).sum().backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return values.detach(), hidden.grad, head.grad


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
@pytest.mark.parametrize("limit", [None, 95])
@pytest.mark.parametrize("block", [99 * 3, 1 << 22])
@pytest.mark.parametrize("linear", [True, False])
def test_values_and_gradients_equal_full_float64_logits(
    chunk: int, limit: int | None, block: int, linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_logprobs, "_BLOCK_ELEMENTS", block)
    split = split_model()
    head = TokenLogProbs(split, temperature=0.6, vocab_limit=limit, chunk_tokens=chunk)
    assert head.linear
    head.linear = linear
    hidden, rows, tokens, weights = inputs()
    hidden.requires_grad_()
    values = head(hidden, rows, tokens)
    (values * weights).sum().backward()
    expected, hidden_gradient, weight_gradient = naive(split, 0.6, limit)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(hidden.grad.double(), hidden_gradient, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(split.model.lm_head.weight.grad.double(), weight_gradient, rtol=1e-4, atol=1e-4)


def test_finite_differences_agree_with_the_gradient() -> None:
    split = split_model()
    head = TokenLogProbs(split, chunk_tokens=8)
    hidden, rows, tokens, weights = inputs()
    hidden.requires_grad_()
    (head(hidden, rows, tokens) * weights).sum().backward()
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        up, down = ((head(hidden + sign * 1e-2 * direction, rows, tokens).double() * weights).sum() for sign in (1, -1))
    assert hidden.grad is not None
    assert float((up - down) / 2e-2) == pytest.approx(float((hidden.grad * direction).sum()), rel=2e-3)


def test_bfloat16_heads_give_float32_logprobs_close_to_float64() -> None:
    split = split_model(torch.bfloat16)
    hidden, rows, tokens, _ = inputs(dtype=torch.bfloat16)
    values = TokenLogProbs(split, chunk_tokens=8)(hidden, rows, tokens)
    assert values.dtype == torch.float32
    logits = (hidden.double() @ split.model.lm_head.weight.detach().double().T).bfloat16().double()
    torch.testing.assert_close(values.double().detach(), torch.log_softmax(logits, -1)[rows, tokens], rtol=0, atol=1e-4)


def test_probabilities_sum_to_one_below_the_vocabulary_limit() -> None:
    head = TokenLogProbs(split_model(), temperature=2.0, vocab_limit=50, chunk_tokens=4)
    hidden = inputs()[0][:1]
    values = head(hidden, torch.zeros(50, dtype=torch.long), torch.arange(50))
    assert float(values.exp().sum().detach()) == pytest.approx(1.0, abs=1e-5)


def test_a_sampled_token_beyond_the_limit_is_an_error_that_names_it() -> None:
    head = TokenLogProbs(split_model(), vocab_limit=50)
    with pytest.raises(ValueError, match="token 77 was sampled but the vocabulary ends at 50"):
        head(inputs()[0], torch.tensor([0, 1]), torch.tensor([3, 77]))


def test_a_head_that_scales_its_logits_is_recognised_and_still_right() -> None:
    source = RandomModel(model_type="granite", config={**FIELDS, "logits_scaling": 4.0}, seed=0)
    split = SplitModel(load_model(source, torch.float32))
    head = TokenLogProbs(split, chunk_tokens=5)
    assert not head.linear
    hidden, rows, tokens, _ = inputs()
    expected = torch.log_softmax(hidden.double() @ split.model.lm_head.weight.double().T / 4.0, -1)[rows, tokens]
    torch.testing.assert_close(head(hidden, rows, tokens).double(), expected, rtol=0, atol=2e-5)


def test_a_soft_cap_of_large_logits_is_recognised_where_small_ones_show_none() -> None:
    """Gemma 2: tanh bends random probes by less than rounding, and the logits of a trained model by half."""
    source = RandomModel(model_type="gemma2", config={**FIELDS, "head_dim": 16}, seed=0)
    split = SplitModel(load_model(source, torch.float32))
    head = TokenLogProbs(split, chunk_tokens=5)
    hidden, rows, tokens, _ = inputs()
    hidden = 100 * hidden
    logits = 30.0 * torch.tanh(hidden.double() @ split.model.lm_head.weight.double().T / 30.0)
    expected = torch.log_softmax(logits, -1)[rows, tokens]
    torch.testing.assert_close(head(hidden, rows, tokens).double(), expected, rtol=0, atol=1e-4)


def test_a_head_of_several_layers_gives_the_models_own_logprobs() -> None:
    fields = {name: FIELDS[name] for name in FIELDS if name != "num_key_value_heads"}
    source = RandomModel(model_type="roberta", config={**fields, "is_decoder": True}, seed=0)
    split = SplitModel(load_model(source, torch.float32))
    hidden, rows, tokens, _ = inputs()
    expected = torch.log_softmax(split.model.lm_head(hidden), -1)[rows, tokens]
    torch.testing.assert_close(TokenLogProbs(split, chunk_tokens=5)(hidden, rows, tokens), expected)
    with pytest.raises(ValueError, match="the head has 99 rows"):
        TokenLogProbs(split, vocab_limit=100)


def test_a_head_with_a_bias_is_not_taken_for_a_plain_product() -> None:
    split = split_model()
    plain = split.model.lm_head
    split.model.lm_head = torch.nn.Linear(32, 99, bias=True)
    with torch.no_grad():
        split.model.lm_head.weight.copy_(plain.weight)
        split.model.lm_head.bias.copy_(torch.linspace(-3, 3, 99))
    head = TokenLogProbs(split, chunk_tokens=5)
    hidden, rows, tokens, _ = inputs()
    logits = hidden.double() @ plain.weight.double().T + torch.linspace(-3, 3, 99).double()
    expected = torch.log_softmax(logits, -1)[rows, tokens]
    torch.testing.assert_close(head(hidden, rows, tokens).double(), expected, rtol=0, atol=2e-5)


def test_the_heads_gradient_is_summed_over_chunks_in_float32() -> None:
    """512 chunks whose shares all but cancel one large one: in bfloat16 each would be rounded away."""
    split = split_model(torch.bfloat16)
    num = 512
    hidden = torch.full((num, 32), 2.0**-9).bfloat16()
    hidden[-1] = 4.0  # chunks are gone through from the last one on
    rows, tokens = torch.arange(num), torch.full((num,), 5)
    TokenLogProbs(split, chunk_tokens=1)(hidden, rows, tokens).sum().backward()
    weight = split.model.lm_head.weight.detach().double().requires_grad_()
    logits = (hidden.double() @ weight.T).bfloat16().double().detach()
    share = torch.nn.functional.one_hot(tokens, 99) - logits.softmax(-1)
    expected = share.T @ hidden.double()
    assert split.model.lm_head.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(split.model.lm_head.weight.grad.double(), expected, rtol=2**-7, atol=2**-9)


def test_a_temperature_of_zero_is_refused() -> None:
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="one above 0"):
            TokenLogProbs(split_model(), temperature=temperature)


def test_argmax_is_of_the_limited_vocabulary() -> None:
    split = split_model()
    hidden, rows, _, _ = inputs()
    best = TokenLogProbs(split, vocab_limit=40, chunk_tokens=6).argmax(hidden, rows)
    assert torch.equal(best, split.logits(hidden)[:, :40].argmax(-1)[rows])


def test_a_second_backward_through_a_kept_graph_gives_the_same_gradient() -> None:
    head = TokenLogProbs(split_model(), chunk_tokens=512)
    hidden, rows, tokens, weights = inputs()
    hidden.requires_grad_()
    loss = (head(hidden, rows, tokens) * weights).sum()
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(first, second)
