"""What every architecture and both decoders of the embedded engine must do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.schema import RolloutConfig
from lockstep.model.adapter import recorded_routes
from lockstep.records import Completion
from lockstep.rollout.torch_engine import TorchEngine
from tests.contract import engine_contract as contract
from tests.contract.engine_contract import PROMPTS, as_sequence, make_request, ragged_requests, run
from tests.contract.engine_models import ARCHITECTURES, FAST, WITH_EXPERTS, tiny_model

TOLERANCE = 1e-5
BOTH_PATHS = [(name, "auto") for name in ARCHITECTURES] + [(name, "off") for name in FAST]


def make_engine(model: Any, **options: Any) -> TorchEngine:
    keywords = {key: options.pop(key) for key in ("decode", "vocab_limit", "stop_token_ids") if key in options}
    config = {"num_slots": 8, "dtype": "float32", **options}
    return TorchEngine(model, RolloutConfig(**config), **keywords)


def full_logprobs(model: Any, prompt: np.ndarray, completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of the sampled tokens by one plain forward of the whole sequence."""
    tokens = torch.tensor(np.concatenate([prompt, completion.tokens])).long()
    with torch.no_grad():
        table = (model(tokens[None]).logits[0].float() / temperature).log_softmax(-1)
    rows = torch.arange(len(prompt) - 1, len(tokens) - 1)
    return table[rows, tokens[len(prompt) :]].numpy()


@pytest.mark.parametrize(("architecture", "path"), BOTH_PATHS)
def test_sampled_logprobs_equal_a_full_forward_and_decode_equals_prefill(architecture, path):
    model = tiny_model(architecture)
    engine = make_engine(model, fast_path=path)
    requests = ragged_requests()
    completions = run(engine, requests)
    sequences = []
    for request, completion in zip(requests, completions, strict=True):
        assert completion.request_id == request.request_id
        assert completion.finish_reason == "length"
        assert len(completion.tokens) == len(completion.logprobs) == request.sampling.max_new_tokens
        expected = full_logprobs(model, request.prompt_tokens, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
        sequences.append(as_sequence(request.request_id, request.prompt_tokens, completion))
    by_prefill, by_decode = engine.score(sequences), engine.score(sequences, path="decode")
    for sequence in sequences:
        counted = sequence.loss_mask
        one, other = by_prefill[sequence.sequence_id], by_decode[sequence.sequence_id]
        np.testing.assert_allclose(one.logprobs[counted], sequence.logprobs[counted], atol=TOLERANCE)
        np.testing.assert_allclose(other.logprobs[1:], one.logprobs[1:], atol=TOLERANCE)
        assert np.isnan(one.logprobs[0])
        assert np.isnan(other.logprobs[0])
        assert one.top1 is not None
        assert one.top1[0] == -1


@pytest.mark.parametrize(("architecture", "path"), BOTH_PATHS)
def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(architecture, path):
    contract.a_seed_gives_the_same_tokens_alone_and_in_a_crowd(make_engine(tiny_model(architecture), fast_path=path))


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_expert_ids_are_those_of_a_full_forward(architecture):
    model = tiny_model(architecture)
    engine = make_engine(model, record_routes=True)
    requests = ragged_requests(want_routes=True)
    completions = run(engine, requests)
    for request, completion in zip(requests, completions, strict=True):
        sequence = as_sequence(request.request_id, request.prompt_tokens, completion)
        with torch.no_grad(), recorded_routes(model) as records:
            model(torch.tensor(sequence.tokens[:-1]).long()[None])
        expected = np.stack([np.sort(record[0].numpy(), axis=-1) for record in records], axis=1)
        assert completion.routes is not None
        assert completion.routes.dtype == np.uint8, "8 experts need one byte"
        np.testing.assert_array_equal(np.sort(completion.routes, axis=-1), expected)
        for path in ("prefill", "decode"):
            scored = engine.score([sequence], path=path)[request.request_id].routes
            assert scored is not None
            np.testing.assert_array_equal(np.sort(scored, axis=-1), expected)


def test_routes_come_only_to_those_who_asked():
    engine = make_engine(tiny_model("qwen3_moe"))
    with_routes = make_request("with", PROMPTS[1], want_routes=True)
    without = make_request("without", PROMPTS[1])
    first, second = run(engine, [with_routes, without])
    assert first.routes is not None
    assert first.routes.shape == (len(PROMPTS[1]) + 8 - 1, 2, 2)
    assert second.routes is None
    assert first.tokens.tolist() == second.tokens.tolist()


@pytest.mark.parametrize("path", ["auto", "off"])
def test_a_group_is_prefilled_once_even_when_it_does_not_fit_the_slots(path):
    engine = make_engine(tiny_model("qwen3"), num_slots=3, fast_path=path)
    completions = run(engine, [make_request(f"{i}", PROMPTS[3], seed=i, max_new_tokens=2 + i) for i in range(8)])
    assert engine.stats.num_prefilled_tokens == len(PROMPTS[3])
    assert engine.stats.num_prefilled_sequences == 1
    assert engine.stats.num_generated_tokens == sum(len(c.tokens) for c in completions) == sum(range(2, 10))
    assert engine.stats.num_finished == 8
    assert engine.stats.mean_slots_used is not None
    assert 1 < engine.stats.mean_slots_used <= 3


@pytest.mark.parametrize("path", ["auto", "off"])
def test_temperature_scales_the_reported_logprobs(path):
    model = tiny_model("llama")
    engine = make_engine(model, temperature=0.6, fast_path=path)
    requests = ragged_requests(temperature=0.6)
    for request, completion in zip(requests, run(engine, requests), strict=True):
        expected = full_logprobs(model, request.prompt_tokens, completion, temperature=0.6)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
        scored = engine.score([as_sequence("s", request.prompt_tokens, completion)])["s"].logprobs
        np.testing.assert_allclose(scored[len(request.prompt_tokens) :], expected, atol=TOLERANCE)


def test_greedy_follows_the_argmax():
    model = tiny_model("qwen3")
    (completion,) = run(make_engine(model), [make_request("g", PROMPTS[1], temperature=0.0)])
    tokens = torch.tensor(PROMPTS[1])
    for token in completion.tokens:
        with torch.no_grad():
            assert int(model(tokens[None]).logits[0, -1].argmax()) == token
        tokens = torch.cat([tokens, torch.tensor([int(token)])])


@pytest.mark.parametrize("path", ["auto", "off"])
def test_ids_beyond_the_tokenizer_are_never_sampled_and_hold_no_probability(path):
    """Padded rows of the vocabulary are cut on the engine's side; the trainer must cut the same."""
    model = tiny_model("qwen3")
    engine = make_engine(model, vocab_limit=40, fast_path=path)
    request = make_request("v", PROMPTS[1], max_new_tokens=60, temperature=5.0)
    (completion,) = run(engine, [request])
    assert completion.tokens.max() < 40
    tokens = torch.tensor(np.concatenate([request.prompt_tokens, completion.tokens])).long()
    with torch.no_grad():
        table = (model(tokens[None]).logits[0, :, :40] / 5.0).log_softmax(-1)
    expected = table[torch.arange(6, 66), tokens[7:]].numpy()
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


def test_the_fast_path_is_taken_where_it_applies_and_only_there():
    def decoder_of(engine: TorchEngine) -> str:
        return type(engine.decoder).__name__

    assert decoder_of(make_engine(tiny_model("llama"))) == "FastDecoder"
    assert decoder_of(make_engine(tiny_model("llama"), fast_path="off")) == "ModuleDecoder"
    windowed = tiny_model("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    assert decoder_of(make_engine(windowed)) == "ModuleDecoder"
    dynamic = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert decoder_of(make_engine(dynamic)) == "ModuleDecoder"


@pytest.mark.parametrize("architecture", FAST)
def test_biases_are_computed_with(architecture):
    model = tiny_model(architecture, attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    requests = ragged_requests()[::4]
    for request, completion in zip(requests, run(make_engine(model), requests), strict=True):
        expected = full_logprobs(model, request.prompt_tokens, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", FAST)
def test_bfloat16_agrees_with_the_model_as_well_as_the_model_with_itself(architecture):
    """The packed layout and the slot cache cost no more than the rounding that any other batch shape would."""
    model = tiny_model(architecture, dtype=torch.bfloat16, initializer_range=0.1)
    requests = ragged_requests()
    differences = {}
    for path in ("auto", "off"):
        completions = run(make_engine(model, dtype="bfloat16", fast_path=path), requests)
        pairs = zip(requests, completions, strict=True)
        difference = [c.logprobs - full_logprobs(model, r.prompt_tokens, c) for r, c in pairs]
        differences[path] = float(np.abs(np.concatenate(difference)).mean())
    assert differences["auto"] < 2 * differences["off"] + 1e-3
    assert differences["auto"] < 0.05
