"""Requests' lives: stop ids and strings, limits, abort, pause, bad requests, faults inside a step."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.model.characters import CharacterTokenizer
from lockstep.rollout.torch_engine import EngineError
from tests.contract.engine_models import tiny_model
from tests.contract.test_engine import PROMPTS, full_logprobs, make_engine, make_request, ragged_requests, run

PATHS = pytest.mark.parametrize("path", ["auto", "off"])


class Steps:
    """Runs requests while a hook looks on after every step of the engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    async def until_generated(self, count: int) -> None:
        while self.engine.stats.num_generated_tokens < count:
            await asyncio.sleep(0)


def test_a_stop_id_ends_the_completion_and_is_part_of_it():
    engine = make_engine(tiny_model("qwen3"))
    (free,) = run(engine, [make_request("free", PROMPTS[0], max_new_tokens=30)])
    stop = int(free.tokens[7])
    first = free.tokens.tolist().index(stop)
    for stopping in (
        make_request("own", PROMPTS[0], max_new_tokens=30, stop_token_ids=(stop,)),
        make_request("engine", PROMPTS[0], max_new_tokens=30),
    ):
        other = make_engine(tiny_model("qwen3"), stop_token_ids=(stop,)) if stopping.request_id == "engine" else engine
        (stopped,) = run(other, [stopping])
        assert stopped.finish_reason == "stop"
        assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
        assert len(stopped.logprobs) == len(stopped.versions) == len(stopped.kv_versions) == first + 1


def test_a_stop_string_across_token_borders_ends_after_the_token_that_completes_it():
    """Nothing is appended that was not sampled: tokens and log-probs have one length."""
    tokenizer = CharacterTokenizer()
    model = tiny_model("qwen3")
    engine = make_engine(model, decode=tokenizer.decode)
    (free,) = run(engine, [make_request("free", PROMPTS[0], max_new_tokens=40)])
    text = tokenizer.decode(free.tokens)
    needle = text[10:13]
    expected = text[: text.index(needle) + 3]
    (stopped,) = run(engine, [make_request("s", PROMPTS[0], max_new_tokens=40, stop_strings=("never there", needle))])
    assert stopped.finish_reason == "stop"
    assert tokenizer.decode(stopped.tokens) == expected
    assert stopped.tokens.tolist() == free.tokens[: len(stopped.tokens)].tolist()
    assert len(stopped.logprobs) == len(stopped.tokens)


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


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [5, 99]}, "vocabulary"),
        ({"prompt": [5, -1]}, "vocabulary"),
        ({"prompt": [5] * 256}, "context"),
        ({"stop_strings": ("x",)}, "decode"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_a_bad_request_fails_alone_and_says_why(change, word):
    engine = make_engine(tiny_model("qwen3"))
    prompt = change.pop("prompt", PROMPTS[0])
    bad, good = run(engine, [make_request("bad", prompt, **change), make_request("good", PROMPTS[0])])
    assert bad.finish_reason == "failed"
    assert bad.error is not None
    assert word in bad.error
    assert len(bad.tokens) == len(bad.logprobs) == 0
    assert good.finish_reason == "length"
    assert engine.stats.num_failed == 1


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


def test_a_request_id_in_flight_is_refused():
    engine = make_engine(tiny_model("qwen3"))
    with pytest.raises(ValueError, match="already in flight"):
        run(engine, [make_request("same", PROMPTS[0]), make_request("same", PROMPTS[1])])


@PATHS
def test_abort_returns_what_was_sampled_and_disturbs_nobody(path):
    engine = make_engine(tiny_model("qwen3"), fast_path=path)
    requests = [make_request(str(i), PROMPTS[1], seed=i, max_new_tokens=20) for i in range(12)]
    undisturbed = run(engine, requests)

    async def scenario() -> list[Any]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        start = engine.stats.num_generated_tokens
        await Steps(engine).until_generated(start + 8 * 6)
        await engine.abort(["2", "3", "11", "unknown"])  # two running, one waiting, one that isn't there
        return list(await asyncio.gather(*tasks))

    completions = asyncio.run(scenario())
    for before, after in zip(undisturbed, completions, strict=True):
        if after.request_id in ("2", "3", "11"):
            assert after.finish_reason == "aborted"
            assert after.tokens.tolist() == before.tokens[: len(after.tokens)].tolist()
            assert len(after.logprobs) == len(after.tokens) < 20
        else:
            assert after.finish_reason == "length"
            assert after.tokens.tolist() == before.tokens.tolist()
    assert [len(completions[i].tokens) > 0 for i in (2, 3, 11)] == [True, True, False]
    assert engine.stats.num_aborted == 3


def test_a_cancelled_caller_frees_its_slot():
    engine = make_engine(tiny_model("qwen3"), num_slots=1)

    async def scenario() -> Any:
        patient = asyncio.ensure_future(engine.generate(make_request("a", PROMPTS[0], max_new_tokens=200)))
        other = asyncio.ensure_future(engine.generate(make_request("b", PROMPTS[1], max_new_tokens=3)))
        await Steps(engine).until_generated(5)
        patient.cancel()
        return await asyncio.wait_for(other, 30)

    assert len(asyncio.run(scenario()).tokens) == 3
    assert engine.stats.num_generated_tokens < 30


@PATHS
@pytest.mark.parametrize("mode", ["finish", "abort", "keep"])
def test_pause_stops_everything_in_its_mode_and_resume_goes_on(path, mode):
    engine = make_engine(tiny_model("qwen3"), fast_path=path, num_slots=4)
    requests = ragged_requests()
    undisturbed = run(engine, requests)

    async def scenario() -> list[Any]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        start = engine.stats.num_generated_tokens
        await Steps(engine).until_generated(start + 20)
        engine.pause(mode)
        paused_at = engine.stats.num_generated_tokens
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats.num_generated_tokens == paused_at
        assert not all(task.done() for task in tasks)
        engine.resume()
        return list(await asyncio.gather(*tasks))

    completions = asyncio.run(scenario())
    aborted = [c for c in completions if c.finish_reason == "aborted"]
    assert bool(aborted) is (mode == "abort")
    for before, after in zip(undisturbed, completions, strict=True):
        assert after.tokens.tolist() == before.tokens[: len(after.tokens)].tolist()
        assert after.finish_reason in ("length", "aborted")
        if after.finish_reason == "length":
            np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5)


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
    engine = make_engine(tiny_model("qwen3"))
    request = make_request("again", PROMPTS[2])
    first, second = run(engine, [request]), run(engine, [request])
    assert first[0].tokens.tolist() == second[0].tokens.tolist()
