"""The real vLLM under the demands of every engine, and what only it must do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from lockstep.model.characters import CharacterTokenizer
from lockstep.records import Completion
from lockstep.refit.transaction import RefitError, run_refit
from lockstep.refit.transports import LocalTransport
from lockstep.rollout import vllm_engine, vllm_start
from lockstep.rollout.queued_engine import EngineError, EngineUnfit
from lockstep.rollout.vllm_engine import VllmEngine
from lockstep.rollout.vllm_folder import write_model_folder
from lockstep.rollout.vllm_start import EngineUnavailable, VllmSettings, engine_arguments
from tests.contract import engine_contract as contract
from tests.contract.engine_contract import PROMPTS, as_sequence, make_request, ragged_requests, run
from tests.contract.test_engine import full_logprobs
from tests.vllm.models import start_engine, tiny_model, tiny_trainer

pytestmark = pytest.mark.lane("stage-a-vllm", hardware={"cpu": "cpu"}, minutes=0.5, owner="vllm", labels=["vllm"])

MODEL_SEED = 1


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3", seed=MODEL_SEED)


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[VllmEngine]:
    """One engine for the demands that leave it as it was."""
    one = start_engine(model, weights=True)
    yield one
    one.close()


@pytest.fixture
def new_engine(model: Any) -> Iterator[Callable[..., VllmEngine]]:
    """Engines of a test's own, closed after it."""
    started: list[VllmEngine] = []

    def start(**options: Any) -> VllmEngine:
        started.append(start_engine(model, weights=True, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def refit_to(engine: VllmEngine, seed: int, version: int) -> Any:
    """Give the engine the weights of another tiny model; returns that model."""
    trainer = tiny_trainer("qwen3", seed=seed)
    trainer._version = version
    run_refit(trainer.weights(), engine.receiver(), LocalTransport(), verify=True)
    return trainer.model


# --- the demands of every engine --------------------------------------------------------------------------------------


def test_sampled_logprobs_equal_a_full_forward_and_decode_equals_prefill(engine: VllmEngine, model: Any) -> None:
    requests = ragged_requests()
    completions = run(engine, requests)
    sequences = []
    for one, completion in zip(requests, completions, strict=True):
        assert completion.request_id == one.request_id
        assert completion.finish_reason == "length"
        assert len(completion.tokens) == len(completion.logprobs) == one.sampling.max_new_tokens
        expected = full_logprobs(model, one.prompt_tokens, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        sequences.append(as_sequence(one.request_id, one.prompt_tokens, completion))
    by_prefill, by_decode = engine.score(sequences), engine.score(sequences, path="decode")
    for sequence in sequences:
        one, other = by_prefill[sequence.sequence_id], by_decode[sequence.sequence_id]
        counted = sequence.loss_mask
        np.testing.assert_allclose(one.logprobs[counted], sequence.logprobs[counted], atol=1e-5)
        np.testing.assert_allclose(other.logprobs[1:], one.logprobs[1:], atol=1e-5)
        assert np.isnan(one.logprobs[0])
        assert np.isnan(other.logprobs[0])
        with torch.no_grad():
            argmax = model(torch.tensor(sequence.tokens).long()[None]).logits[0].argmax(-1).tolist()
        for scored in (one, other):
            assert scored.top1 is not None
            assert scored.top1.tolist() == [-1, *argmax[:-1]]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(engine: VllmEngine) -> None:
    contract.a_seed_gives_the_same_tokens_alone_and_in_a_crowd(engine)


def test_a_stop_id_ends_the_completion_and_is_part_of_it(engine: VllmEngine) -> None:
    contract.a_stop_id_ends_the_completion_and_is_part_of_it(engine)


def test_a_stop_string_ends_after_the_token_that_completes_it(new_engine: Callable[..., VllmEngine]) -> None:
    one = new_engine(decode=CharacterTokenizer().decode)
    contract.a_stop_string_across_token_borders_ends_after_the_token_that_completes_it(one)


@pytest.mark.parametrize(
    ("change", "word"),
    # vLLM clamps or refuses temperatures that the embedded engine takes.
    [*contract.BAD_REQUESTS, ({"temperature": 2.5}, "from 0.01 to 2"), ({"temperature": 0.001}, "from 0.01 to 2")],
)
def test_a_bad_request_fails_alone_and_says_why(engine: VllmEngine, change: dict[str, Any], word: str) -> None:
    contract.a_bad_request_fails_alone_and_says_why(engine, change, word)


def test_a_request_id_in_flight_is_refused(engine: VllmEngine) -> None:
    contract.a_request_id_in_flight_is_refused(engine)


def test_abort_returns_what_was_sampled_and_disturbs_nobody(engine: VllmEngine) -> None:
    contract.abort_returns_what_was_sampled_and_disturbs_nobody(engine)


def test_a_cancelled_caller_frees_its_slot(new_engine: Callable[..., VllmEngine]) -> None:
    contract.a_cancelled_caller_frees_its_slot(new_engine(num_slots=1))


@pytest.mark.parametrize("mode", ["finish", "abort", "keep"])
def test_pause_stops_everything_in_its_mode(engine: VllmEngine, mode: Literal["finish", "abort", "keep"]) -> None:
    contract.pause_stops_everything_in_its_mode_and_resume_goes_on(engine, mode)


def test_an_engine_serves_one_event_loop_after_another(engine: VllmEngine) -> None:
    contract.an_engine_serves_one_event_loop_after_another(engine)


def test_requests_kept_over_a_refit_carry_both_versions(new_engine: Callable[..., VllmEngine], model: Any) -> None:
    one = new_engine()
    new: list[Any] = []
    contract.tokens_after_a_refit_carry_the_new_version_of_weights_and_cache(
        one,
        lambda: new.append(refit_to(one, seed=2, version=5)),
        lambda prompt, completion: full_logprobs(model, prompt, completion),
        lambda prompt, completion: full_logprobs(new[0], prompt, completion),
    )
    contract.a_pause_of_the_callers_outlasts_a_refit(one, lambda: refit_to(one, seed=3, version=6) and None)


def test_a_prompt_in_the_prefix_cache_is_not_reused_after_a_refit(new_engine: Callable[..., VllmEngine]) -> None:
    """Long enough for whole blocks to be cached, and seen to be."""
    one = new_engine(engine_args={"block_size": 32})
    prompt = [3 + i % 90 for i in range(100)]
    run(one, [make_request("first", prompt)])
    before = one.stats.num_prefilled_tokens
    run(one, [make_request("again", prompt)])
    assert one.stats.num_prefilled_tokens - before < len(prompt), "the cache serves it while the weights stay"
    new = refit_to(one, seed=2, version=1)
    before = one.stats.num_prefilled_tokens
    (fresh,) = run(one, [make_request("after", prompt)])
    assert one.stats.num_prefilled_tokens - before == len(prompt)
    expected = full_logprobs(new, np.asarray(prompt), fresh)
    np.testing.assert_allclose(fresh.logprobs, expected, atol=1e-5)


# --- what only vLLM must do -------------------------------------------------------------------------------------------


def test_greedy_follows_the_argmax_and_truncated_sampling_reports_its_own_distribution(
    engine: VllmEngine, model: Any
) -> None:
    (greedy,) = run(engine, [make_request("g", PROMPTS[1], temperature=0.0)])
    tokens = torch.tensor([*PROMPTS[1], *greedy.tokens.tolist()])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    assert logits[len(PROMPTS[1]) - 1 : -1].argmax(-1).tolist() == greedy.tokens.tolist()
    (cut,) = run(engine, [make_request("k", PROMPTS[1], top_k=3, temperature=0.7)])
    tokens = torch.tensor([*PROMPTS[1], *cut.tokens.tolist()])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(PROMPTS[1]) - 1 : -1] / 0.7
    kept = logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf).log_softmax(-1)
    expected = kept[torch.arange(len(cut.tokens)), torch.tensor(cut.tokens).long()]
    np.testing.assert_allclose(cut.logprobs, expected.numpy(), atol=1e-5)


def test_ids_beyond_the_tokenizer_are_never_sampled_and_hold_no_probability(
    new_engine: Callable[..., VllmEngine], model: Any
) -> None:
    one = new_engine(vocab_limit=40, temperature=2.0)
    asked = make_request("v", PROMPTS[1], max_new_tokens=60, temperature=2.0)
    (completion,) = run(one, [asked])
    assert completion.tokens.max() < 40
    tokens = torch.tensor(np.concatenate([asked.prompt_tokens, completion.tokens])).long()
    with torch.no_grad():
        table = (model(tokens[None]).logits[0, :, :40] / 2.0).log_softmax(-1)
    expected = table[torch.arange(6, 66), tokens[7:]].numpy()
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
    sequence = as_sequence("v", asked.prompt_tokens, completion)
    for path in ("prefill", "decode"):
        scored = one.score([sequence], path)["v"].logprobs[7:]
        np.testing.assert_allclose(scored, expected, atol=1e-5)


def test_a_sequence_as_long_as_the_context_is_sampled_and_scored(
    new_engine: Callable[..., VllmEngine], model: Any
) -> None:
    one = new_engine(max_model_len=256)
    asked = make_request("long", [7] * 240, max_new_tokens=1000)
    (completion,) = run(one, [asked])
    assert completion.finish_reason == "length"
    assert len(completion.tokens) == 16
    sequence = as_sequence("long", asked.prompt_tokens, completion)
    expected = full_logprobs(model, asked.prompt_tokens, completion)
    for path in ("prefill", "decode"):
        np.testing.assert_allclose(one.score([sequence], path)["long"].logprobs[240:], expected, atol=1e-5)
    too_long = make_request("longer", [7] * 256)
    (refused,) = run(one, [too_long])
    assert refused.finish_reason == "failed"


def test_prompts_beyond_the_prefill_budget_are_sampled_with_their_seeds(
    new_engine: Callable[..., VllmEngine], model: Any
) -> None:
    """Three that exceed it together, and a fourth that does alone: none may be prefilled in pieces on a CPU."""
    one = new_engine(prefill_tokens=64)
    lengths = (50, 50, 50, 150)
    asked = [make_request(f"p{i}", [5 + i] * length, seed=i) for i, length in enumerate(lengths)]
    for request, completion in zip(asked, run(one, asked), strict=True):
        assert completion.finish_reason == "length", completion.error
        expected = full_logprobs(model, request.prompt_tokens, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_logits_with_nan_fail_their_request_and_are_never_sampled() -> None:
    sick_model = tiny_model("qwen3", seed=MODEL_SEED)
    with torch.no_grad():
        sick_model.model.embed_tokens.weight[60] = torch.nan
    one = start_engine(sick_model, weights=True)
    try:
        sick, well = run(one, [make_request("sick", [5, 60, 6]), make_request("well", [5, 6, 7])])
    finally:
        one.close()
    assert sick.finish_reason == "failed"
    assert sick.error is not None
    assert "NaN" in sick.error
    assert len(sick.tokens) == 0
    assert well.finish_reason == "length"
    assert np.isfinite(well.logprobs).all()


def test_a_fault_inside_a_step_is_raised_to_every_caller(new_engine: Callable[..., VllmEngine]) -> None:
    one = new_engine()
    requests = [make_request(str(i), PROMPTS[0], seed=i, max_new_tokens=5) for i in range(10)]
    step = one.llm.llm_engine.step

    def broken() -> Any:
        raise RuntimeError("planted")

    one.llm.llm_engine.step = broken
    with pytest.raises(EngineError, match="planted"):
        run(one, requests)
    one.llm.llm_engine.step = step
    assert {c.finish_reason for c in run(one, requests)} == {"length"}


def test_sleep_stops_admission_and_level_2_asks_for_a_refit(new_engine: Callable[..., VllmEngine]) -> None:
    one = new_engine()
    before = run(one, [make_request("r", PROMPTS[0])])[0].tokens.tolist()
    assert one.sleep(1) is False, "a CPU frees nothing, and the engine says so"
    one.wake()
    assert run(one, [make_request("r", PROMPTS[0])])[0].tokens.tolist() == before
    one.sleep(2)
    one.wake()
    with pytest.raises(EngineUnfit, match="level 2"):
        run(one, [make_request("r", PROMPTS[0])])
    with pytest.raises(EngineUnfit, match="level 2"):
        one.score([])
    refit_to(one, seed=MODEL_SEED, version=3)
    assert run(one, [make_request("r", PROMPTS[0])])[0].tokens.tolist() == before


@pytest.mark.parametrize(("left", "freed"), [(5 << 30, False), (1 << 30, True)])
def test_sleep_is_believed_by_the_devices_own_count(
    left: int, freed: bool, new_engine: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A platform that says it has freed 4 GiB, and has or has not (vllm-project/vllm#37533)."""
    one = new_engine()
    counts = [5 << 30]
    monkeypatch.setattr(VllmEngine, "_can_sleep", True)
    monkeypatch.setattr(vllm_engine, "pausable_bytes", lambda: 4 << 30)
    monkeypatch.setattr(vllm_engine, "device_count", lambda: lambda: counts[-1])
    monkeypatch.setattr(one.llm, "sleep", lambda level: counts.append(left))
    monkeypatch.setattr(one.llm, "wake_up", lambda tags: None)
    assert one.sleep(1) is freed
    assert one.sleep(1), "asleep already: there is nothing more to give back"
    one.wake()


def test_a_sleeping_engine_is_neither_refitted_nor_scored_and_a_refit_is_not_slept_through(
    new_engine: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU its weights have no memory then. A CPU gives nothing back, so vLLM's own calls are taken out here."""
    one = new_engine()
    version, asleep = one.version, [True]
    monkeypatch.setattr(VllmEngine, "_can_sleep", True)
    monkeypatch.setattr(vllm_engine, "pausable_bytes", lambda: 0)
    monkeypatch.setattr(one.llm, "sleep", lambda level: None)
    monkeypatch.setattr(one.llm, "wake_up", lambda tags: None)
    monkeypatch.setattr(one.llm.llm_engine, "is_sleeping", lambda: asleep[0])
    one.sleep(1)
    with pytest.raises(RefitError, match="sleeps and the memory of its weights is given back"):
        refit_to(one, seed=MODEL_SEED, version=5)
    with pytest.raises(EngineUnfit, match="wake it first"):
        one.score([])
    assert one.version == version
    one.wake(["weights"])
    refit_to(one, seed=MODEL_SEED, version=6)
    asleep[0] = False
    one.wake(["kv_cache"])
    assert run(one, [make_request("r", PROMPTS[0])])[0].finish_reason == "length"
    one.refit_begun()
    with pytest.raises(RuntimeError, match="a refit is not over"):
        one.sleep(2)
    one.refit_aborted("for the test")


def test_scoring_is_refused_where_it_would_disturb_requests(engine: VllmEngine) -> None:
    async def scenario() -> None:
        task = asyncio.ensure_future(engine.generate(make_request("r", PROMPTS[0], max_new_tokens=20)))
        await contract.until_generated(engine, engine.stats.num_generated_tokens + 3)
        engine.pause("keep")
        with pytest.raises(RuntimeError, match="paused"):
            engine.score([as_sequence("s", np.array([5, 6], np.int32), _nothing())])
        engine.resume()
        await task

    asyncio.run(scenario())


def _nothing() -> Any:
    empty = np.empty(0, np.int32)
    return Completion("s", empty, np.empty(0, np.float32), empty, empty, "length")


def test_settings_survive_json_and_unknown_ones_are_refused() -> None:
    settings = VllmSettings("folder", stop_token_ids=(2, 3), engine_args={"block_size": 32})
    assert VllmSettings.from_dict(json.loads(json.dumps(settings.as_dict()))) == settings
    with pytest.raises(ValueError, match="ghost"):
        VllmSettings.from_dict({"model_folder": "folder", "ghost": 1})


def test_arguments_that_decide_what_is_sampled_are_refused(tmp_path: Any, model: Any) -> None:
    folder = str(write_model_folder(model, tmp_path))
    with pytest.raises(EngineUnavailable, match="logprobs_mode is decided by Lockstep"):
        VllmEngine(VllmSettings(folder, engine_args={"logprobs_mode": "raw_logprobs"}))
    with pytest.raises(EngineUnavailable, match="no argument ghost"):
        VllmEngine(VllmSettings(folder, engine_args={"ghost": 1}))
    with pytest.raises(EngineUnavailable, match="computes on cpu, the run on cuda"):
        VllmEngine(VllmSettings(folder), device="cuda")
    for name in ("enable_chunked_prefill", "long_prefill_token_threshold"):
        with pytest.raises(EngineUnavailable, match=f"{name} lets vLLM compute prompts in pieces"):
            VllmEngine(VllmSettings(folder, engine_args={name: 1}))


@pytest.mark.parametrize(
    ("on_cpu", "more", "budget"),
    [(True, {}, 257), (True, {"max_model_len": 40}, 64), (False, {}, 64)],
)
def test_a_cpu_prefills_prompts_whole(
    tmp_path: Any, model: Any, on_cpu: bool, more: dict[str, int], budget: int
) -> None:
    settings = VllmSettings(str(write_model_folder(model, tmp_path)), prefill_tokens=64, num_slots=8, **more)
    arguments = engine_arguments(settings, vllm_start._known_arguments(), on_cpu=on_cpu)
    assert arguments["max_num_batched_tokens"] == budget
    assert arguments.get("enable_chunked_prefill") is (False if on_cpu else None)
    settings = replace(settings, engine_args={"enable_chunked_prefill": False})
    arguments = engine_arguments(settings, vllm_start._known_arguments(), on_cpu=on_cpu)
    assert arguments["enable_chunked_prefill"] is False


def test_the_trainers_process_keeps_its_random_streams_and_threads(new_engine: Callable[..., VllmEngine]) -> None:
    set_num_threads = torch.set_num_threads
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    new_engine()
    assert torch.equal(torch.rand(3), expected)
    assert torch.set_num_threads is set_num_threads
