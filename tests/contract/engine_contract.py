"""Demands on every engine that serves requests, whatever computes: each function runs one scenario and asserts.

An engine comes with 8 slots, in float32, over a tiny model with a vocabulary of 99 and a context of 256 tokens, and may
be used by several scenarios one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from lockstep.model.characters import CharacterTokenizer
from lockstep.records import NOT_SAMPLED, Completion, GenerateRequest, SamplingParams, Sequence

PROMPTS = [list(range(5, 5 + n)) for n in (3, 7, 7, 11)]
Logprobs = Callable[[np.ndarray, Completion], np.ndarray]
"""(prompt, completion) → log-probs of its tokens under some weights."""


def make_request(name: str, prompt: Any, seed: int = 0, want_routes: bool = False, **sampling: Any) -> GenerateRequest:
    """One completion of eight tokens unless told otherwise."""
    params = SamplingParams(**{"max_new_tokens": 8, "seed": seed, **sampling})
    return GenerateRequest(name, np.asarray(prompt, dtype=np.int32), params, want_routes)


def run(engine: Any, requests: Any) -> list[Completion]:
    """All completions, sampled together."""

    async def gather() -> list[Completion]:
        return list(await asyncio.gather(*[engine.generate(request) for request in requests]))

    return asyncio.run(gather())


def ragged_requests(want_routes: bool = False, **sampling: Any) -> list[GenerateRequest]:
    """Two groups of different prompts of equal length among them, ragged answer lengths, more than the slots hold."""
    return [
        make_request(
            f"{p}/{i}", [t + p for t in prompt], 100 * p + i, want_routes, max_new_tokens=3 + 5 * i, **sampling
        )
        for p, prompt in enumerate(PROMPTS)
        for i in range(4)
    ]


def as_sequence(name: str, prompt: np.ndarray, completion: Completion) -> Sequence:
    """Prompt and answer as the trainer sees them."""
    before = np.full(len(prompt), NOT_SAMPLED, dtype=np.int32)
    return Sequence(
        name,
        tokens=np.concatenate([prompt, completion.tokens]),
        loss_mask=np.arange(len(prompt) + len(completion.tokens)) >= len(prompt),
        logprobs=np.concatenate([np.zeros(len(prompt), np.float32), completion.logprobs]),
        versions=np.concatenate([before, completion.versions]),
        kv_versions=np.concatenate([before, completion.kv_versions]),
        routes=completion.routes,
    )


async def until_generated(engine: Any, count: int) -> None:
    """Wait while the engine's driver runs, until it has sampled ``count`` tokens since it was made."""
    while engine.stats.num_generated_tokens < count:
        await asyncio.sleep(0)


def a_seed_gives_the_same_tokens_alone_and_in_a_crowd(engine: Any) -> None:
    """And the samples of a group differ."""
    requests = ragged_requests()
    crowd = run(engine, requests)
    for request, together in list(zip(requests, crowd, strict=True))[1::5]:
        (alone,) = run(engine, [request])
        assert alone.tokens.tolist() == together.tokens.tolist()
    assert len({tuple(c.tokens[:3]) for c in crowd[:4]}) > 1, "the samples of a group must differ"


def a_stop_id_ends_the_completion_and_is_part_of_it(engine: Any) -> None:
    """Tokens, log-probs and versions have one length, the stop token's included."""
    (free,) = run(engine, [make_request("free", PROMPTS[0], max_new_tokens=30)])
    stop = int(free.tokens[7])
    first = free.tokens.tolist().index(stop)
    (stopped,) = run(engine, [make_request("own", PROMPTS[0], max_new_tokens=30, stop_token_ids=(stop,))])
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert len(stopped.logprobs) == len(stopped.versions) == len(stopped.kv_versions) == first + 1


def a_stop_string_across_token_borders_ends_after_the_token_that_completes_it(engine: Any) -> None:
    """The engine's ``decode`` is the character tokenizer's. Nothing is appended that was not sampled."""
    tokenizer = CharacterTokenizer()
    (free,) = run(engine, [make_request("free", PROMPTS[0], max_new_tokens=40)])
    text = tokenizer.decode(free.tokens)
    needle = text[10:13]
    expected = text[: text.index(needle) + 3]
    (stopped,) = run(engine, [make_request("s", PROMPTS[0], max_new_tokens=40, stop_strings=("never there", needle))])
    assert stopped.finish_reason == "stop"
    assert tokenizer.decode(stopped.tokens) == expected
    assert stopped.tokens.tolist() == free.tokens[: len(stopped.tokens)].tolist()
    assert len(stopped.logprobs) == len(stopped.tokens)


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
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
]


def a_bad_request_fails_alone_and_says_why(engine: Any, change: dict[str, Any], word: str) -> None:
    """``engine`` was made without ``decode``."""
    prompt = change.get("prompt", PROMPTS[0])
    options = {name: value for name, value in change.items() if name != "prompt"}
    failed = engine.stats.num_failed
    bad, good = run(engine, [make_request("bad", prompt, **options), make_request("good", PROMPTS[0])])
    assert bad.finish_reason == "failed"
    assert bad.error is not None
    assert word in bad.error
    assert len(bad.tokens) == len(bad.logprobs) == 0
    assert good.finish_reason == "length"
    assert engine.stats.num_failed == failed + 1


def a_request_id_in_flight_is_refused(engine: Any) -> None:
    """Once it is over, its id may be used again."""
    with pytest.raises(ValueError, match="already in flight"):
        run(engine, [make_request("same", PROMPTS[0]), make_request("same", PROMPTS[1])])


def abort_returns_what_was_sampled_and_disturbs_nobody(engine: Any) -> None:
    """Two running, one waiting, one that isn't there."""
    requests = [make_request(str(i), PROMPTS[1], seed=i, max_new_tokens=20) for i in range(12)]
    undisturbed = run(engine, requests)
    aborted = engine.stats.num_aborted

    async def scenario() -> list[Any]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await until_generated(engine, engine.stats.num_generated_tokens + 8 * 6)
        await engine.abort(["2", "3", "11", "unknown"])
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
    assert engine.stats.num_aborted == aborted + 3


def a_cancelled_caller_frees_its_slot(engine: Any) -> None:
    """``engine`` has one slot, which the other request needs."""
    before = engine.stats.num_generated_tokens

    async def scenario() -> Any:
        patient = asyncio.ensure_future(engine.generate(make_request("a", PROMPTS[0], max_new_tokens=200)))
        other = asyncio.ensure_future(engine.generate(make_request("b", PROMPTS[1], max_new_tokens=3)))
        await until_generated(engine, before + 5)
        patient.cancel()
        return await asyncio.wait_for(other, 30)

    assert len(asyncio.run(scenario()).tokens) == 3
    assert engine.stats.num_generated_tokens - before < 30


def pause_stops_everything_in_its_mode_and_resume_goes_on(
    engine: Any, mode: Literal["finish", "abort", "keep"]
) -> None:
    """Kept requests go on with the random stream that they had."""
    requests = ragged_requests()
    undisturbed = run(engine, requests)

    async def scenario() -> list[Any]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await until_generated(engine, engine.stats.num_generated_tokens + 20)
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


def tokens_after_a_refit_carry_the_new_version_of_weights_and_cache(
    engine: Any, refit: Callable[[], None], by_old: Logprobs, by_new: Logprobs
) -> None:
    """Requests in flight are kept: prefilled again under the new weights, so no old key serves the new version."""
    old = engine.version
    requests = [make_request(str(i), PROMPTS[3], seed=i, max_new_tokens=16) for i in range(16)]

    async def scenario() -> list[Any]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await until_generated(engine, engine.stats.num_generated_tokens + 8 * 6)
        refit()
        return list(await asyncio.gather(*tasks))

    completions = asyncio.run(scenario())
    new = engine.version
    assert new != old
    for index, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        assert completion.finish_reason == "length"
        versions = completion.versions.tolist()
        assert versions == sorted(versions)
        assert completion.kv_versions.tolist() == versions
        assert set(versions) == ({old, new} if index < 8 else {new})
        tables = by_old(request.prompt_tokens, completion), by_new(request.prompt_tokens, completion)
        np.testing.assert_allclose(completion.logprobs, np.where(completion.versions == old, *tables), atol=1e-5)


def a_pause_of_the_callers_outlasts_a_refit(engine: Any, refit: Callable[[], None]) -> None:
    """Nothing is admitted until ``resume``, and then under the new weights."""
    engine.pause("finish")
    refit()
    before = engine.stats.num_generated_tokens

    async def scenario() -> Any:
        task = asyncio.ensure_future(engine.generate(make_request("r", PROMPTS[0])))
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.stats.num_generated_tokens == before
        engine.resume()
        return await task

    assert set(asyncio.run(scenario()).versions.tolist()) == {engine.version}


def an_engine_serves_one_event_loop_after_another(engine: Any) -> None:
    """And gives the same tokens in each."""
    request = make_request("again", PROMPTS[2])
    first, second = run(engine, [request]), run(engine, [request])
    assert first[0].tokens.tolist() == second[0].tokens.tolist()
