"""Requests' lives: stop ids and strings, limits, abort, pause, bad requests, faults inside a step."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.model.characters import CharacterTokenizer
from lockstep.rollout.torch_engine import EngineError
from tests.contract import engine_contract as contract
from tests.contract.engine_contract import PROMPTS, make_request, run
from tests.contract.engine_models import tiny_model
from tests.contract.test_engine import full_logprobs, make_engine

PATHS = pytest.mark.parametrize("path", ["auto", "off"])


def test_a_stop_id_ends_the_completion_and_is_part_of_it():
    contract.a_stop_id_ends_the_completion_and_is_part_of_it(make_engine(tiny_model("qwen3")))


def test_stop_ids_of_the_engine_stop_every_request():
    (free,) = run(make_engine(tiny_model("qwen3")), [make_request("free", PROMPTS[0], max_new_tokens=30)])
    stop = int(free.tokens[7])
    first = free.tokens.tolist().index(stop)
    engine = make_engine(tiny_model("qwen3"), stop_token_ids=(stop,))
    (stopped,) = run(engine, [make_request("engine", PROMPTS[0], max_new_tokens=30)])
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()


def test_a_stop_string_across_token_borders_ends_after_the_token_that_completes_it():
    engine = make_engine(tiny_model("qwen3"), decode=CharacterTokenizer().decode)
    contract.a_stop_string_across_token_borders_ends_after_the_token_that_completes_it(engine)


@pytest.mark.parametrize("needle", ["<pad>", "<bos>", "<eos>"])
def test_a_stop_string_that_is_a_special_token_fires_if_decode_keeps_special_tokens(needle):
    """With 8 ids to choose from the special one comes up soon; the engine has not been told its id."""
    tokenizer = CharacterTokenizer()
    special = ["<pad>", "<bos>", "<eos>"].index(needle)
    model = tiny_model("qwen3")

    def keep_special(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    request = make_request("s", [3, 4, 5], max_new_tokens=60, stop_strings=(needle,))
    (stopped,) = run(make_engine(model, decode=keep_special, vocab_limit=8), [request])
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist().index(special) == len(stopped.tokens) - 1
    assert len(stopped.logprobs) == len(stopped.tokens)
    (missed,) = run(make_engine(model, decode=tokenizer.decode, vocab_limit=8), [request])
    assert missed.finish_reason == "length", "text without special tokens can't show it"


@pytest.mark.parametrize(("change", "word"), contract.BAD_REQUESTS)
def test_a_bad_request_fails_alone_and_says_why(change, word):
    contract.a_bad_request_fails_alone_and_says_why(make_engine(tiny_model("qwen3")), change, word)


@PATHS
def test_prompt_and_answer_are_clamped_to_the_context(path):
    model = tiny_model("llama", max_position_embeddings=32)
    engine = make_engine(model, fast_path=path)
    prompt = [7] * 25
    (completion,) = run(engine, [make_request("long", prompt, max_new_tokens=1000)])
    assert completion.finish_reason == "length"
    assert len(completion.tokens) == 7
    expected = full_logprobs(model, np.asarray(prompt), completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


@PATHS
def test_logits_with_nan_fail_their_request_and_are_never_sampled(path):
    model = tiny_model("qwen3", tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[60] = torch.nan
    engine = make_engine(model, fast_path=path)
    sick, well = run(engine, [make_request("sick", [5, 60, 6]), make_request("well", [5, 6, 7], max_new_tokens=1)])
    assert sick.finish_reason == "failed"
    assert sick.error is not None
    assert "NaN" in sick.error
    assert len(sick.tokens) == 0
    assert well.finish_reason == "length"
    assert np.isfinite(well.logprobs).all()


@PATHS
@pytest.mark.parametrize("others", [0, 2])
def test_what_a_failed_request_left_in_its_place_reaches_nobody_who_comes_after(path, others):
    """Not who takes its row at once, nor who is moved into it: their masked positions would multiply NaN by zero."""
    model = tiny_model("qwen3", tie_word_embeddings=False)
    requests = [make_request("short", [5, 6, 7]), make_request("long", range(5, 45))]
    expected = run(make_engine(model, fast_path=path), requests)
    with torch.no_grad():
        model.model.embed_tokens.weight[60] = torch.nan
    engine = make_engine(model, fast_path=path)
    for _ in range(2):
        beside = [make_request(f"well {i}", [5 + i], seed=i, max_new_tokens=2) for i in range(others)]
        found = run(engine, [make_request("sick", [60] * 30), *beside])
        assert [one.finish_reason for one in found] == ["failed"] + ["length"] * others
        for before, after in zip(expected, run(engine, requests), strict=True):
            assert (after.finish_reason, after.error) == ("length", None)
            assert after.tokens.tolist() == before.tokens.tolist()
            np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5)


def test_a_request_id_in_flight_is_refused():
    contract.a_request_id_in_flight_is_refused(make_engine(tiny_model("qwen3")))


@PATHS
def test_abort_returns_what_was_sampled_and_disturbs_nobody(path):
    contract.abort_returns_what_was_sampled_and_disturbs_nobody(make_engine(tiny_model("qwen3"), fast_path=path))


def test_a_cancelled_caller_frees_its_slot():
    contract.a_cancelled_caller_frees_its_slot(make_engine(tiny_model("qwen3"), num_slots=1))


@PATHS
@pytest.mark.parametrize("mode", ["finish", "abort", "keep"])
def test_pause_stops_everything_in_its_mode_and_resume_goes_on(path, mode):
    engine = make_engine(tiny_model("qwen3"), fast_path=path, num_slots=4)
    contract.pause_stops_everything_in_its_mode_and_resume_goes_on(engine, mode)


def test_a_fault_inside_a_step_is_raised_to_every_caller_and_the_engine_recovers():
    engine = make_engine(tiny_model("qwen3"))
    requests = [make_request(str(i), PROMPTS[0], seed=i, max_new_tokens=5) for i in range(10)]
    whole = engine.decoder.logits
    engine.decoder.logits = lambda hidden: whole(hidden)[:, :0]

    async def scenario() -> list[Any]:
        return await asyncio.gather(*[engine.generate(request) for request in requests], return_exceptions=True)

    results = asyncio.run(scenario())
    assert all(isinstance(result, EngineError) for result in results)
    assert results[0].__cause__ is not None
    del engine.decoder.logits
    assert all(c.finish_reason == "length" for c in run(engine, requests))


def test_an_engine_serves_one_event_loop_after_another():
    contract.an_engine_serves_one_event_loop_after_another(make_engine(tiny_model("qwen3")))
