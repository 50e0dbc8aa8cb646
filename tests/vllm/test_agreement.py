"""The trainer and a real vLLM run the same policy after the start and after refits; without a refit they do not.

The reference for greedy answers is a fresh engine that loads the trainer's weights from disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch

from lockstep.records import Completion, GenerateRequest, Sequence
from lockstep.refit.transaction import Receipt, run_refit
from lockstep.refit.transports import LocalTransport
from lockstep.train.fsdp import FsdpTrainer
from tests.contract.engine_contract import as_sequence, ragged_requests, run
from tests.vllm.models import FAMILIES, greedy_tokens, registry, start_engine, tiny_model, tiny_trainer

pytestmark = pytest.mark.lane("stage-a-vllm", hardware={"cpu": "cpu"}, minutes=1, owner="vllm", labels=["vllm"])

BOUND = 1e-5
Path = Literal["prefill", "decode"]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, FsdpTrainer, Any]]:
    """A trainer and an engine that started with random weights of its own."""
    family: str = request.param
    trainer = tiny_trainer(family, seed=1)
    engine = start_engine(tiny_model(family, seed=1), derived=registry())
    yield family, trainer, engine
    engine.close()


def sequences_of(requests: list[GenerateRequest], completions: list[Completion]) -> list[Sequence]:
    both = zip(requests, completions, strict=True)
    return [as_sequence(one.request_id, one.prompt_tokens, completion) for one, completion in both]


def random_sequence(length: int = 40) -> Sequence:
    tokens = np.random.default_rng(0).integers(3, 90, length).astype(np.int32)
    zeros = np.zeros(length, np.int32)
    return Sequence("probe", tokens, np.arange(length) >= 4, np.zeros(length, np.float32), zeros, zeros)


def refit(trainer: FsdpTrainer, engine: Any) -> Receipt:
    return run_refit(trainer.weights(), engine.receiver(), LocalTransport(), verify=True)


def give(trainer: FsdpTrainer, family: str, seed: int) -> None:
    """Give the trainer deliberately different weights, as the next version."""
    other = dict(tiny_model(family, seed=seed).state_dict())
    with torch.no_grad():
        for name, tensor in trainer.model.state_dict(keep_vars=True).items():
            tensor.copy_(other[name])
    trainer._version += 1


def largest_difference(trainer: FsdpTrainer, engine: Any, sequences: list[Sequence], path: Path) -> float:
    ours, theirs = trainer.logprobs(sequences), engine.score(sequences, path)
    pairs = [
        (ours[one.sequence_id].logprobs[one.loss_mask], theirs[one.sequence_id].logprobs[one.loss_mask])
        for one in sequences
    ]
    # An engine that was never refitted may hold anything, NaN included.
    return max(float(np.nan_to_num(np.abs(one - other), nan=np.inf).max()) for one, other in pairs)


def assert_agreement(trainer: FsdpTrainer, engine: Any) -> None:
    """Sampled log-probs, and both ways of scoring them, against the trainer's."""
    requests = ragged_requests()
    completions = run(engine, requests)
    assert {completion.finish_reason for completion in completions} == {"length"}
    sequences = sequences_of(requests, completions)
    trained = trainer.logprobs(sequences)
    for one in sequences:
        assert set(one.versions[one.loss_mask]) == {trainer.version}
        ours = trained[one.sequence_id].logprobs
        np.testing.assert_allclose(one.logprobs[one.loss_mask], ours[one.loss_mask], atol=BOUND, rtol=0)
    for path in ("prefill", "decode"):
        assert largest_difference(trainer, engine, sequences, path) <= BOUND, path


def assert_equal_to_a_fresh_engine(trainer: FsdpTrainer, engine: Any) -> None:
    """256 of 256 greedy tokens, and the engine of other weights has others."""
    fresh = start_engine(trainer.model, weights=True)
    try:
        expected = greedy_tokens(fresh)
    finally:
        fresh.close()
    assert greedy_tokens(engine) == expected
    assert sum(map(len, expected)) == 256


def test_engine_and_trainer_agree_after_the_start_and_after_refits(pair: tuple[str, FsdpTrainer, Any]) -> None:
    family, trainer, engine = pair
    probe = [random_sequence()]
    for path in ("prefill", "decode"):
        assert largest_difference(trainer, engine, probe, path) > 1e-2, "without a refit this test must fail"
    for number in range(1, 11):
        if number > 1:
            stale = greedy_tokens(engine, 2)
            give(trainer, family, seed=number)
        receipt = refit(trainer, engine)
        statuses = {claim.name: claim.status for claim in receipt.claims}
        assert statuses["covered"] == statuses["loaded"] == "held"
        assert engine.version == trainer.version == receipt.version
        if number > 1:
            assert greedy_tokens(engine, 2) != stale, "the weight sets must differ for this test to mean anything"
        if number in (1, 2, 3, 10):
            assert_agreement(trainer, engine)
        if number in (1, 3, 10):
            assert_equal_to_a_fresh_engine(trainer, engine)


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_both_ways_of_scoring_follow_the_temperature(path: Path) -> None:
    """vLLM applies none to prompt tokens: the engine has to."""
    trainer = tiny_trainer("qwen3", seed=1, temperature=0.6)
    engine = start_engine(trainer.model, weights=True, temperature=0.6)
    try:
        requests = ragged_requests(temperature=0.6)
        completions = run(engine, requests)
        sequences = sequences_of(requests, completions)
        assert largest_difference(trainer, engine, sequences, path) <= BOUND
        scored = engine.score(sequences, path)
        for one in sequences:
            found = scored[one.sequence_id].logprobs[one.loss_mask]
            np.testing.assert_allclose(found, one.logprobs[one.loss_mask], atol=BOUND, rtol=0)
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_expert_ids_are_those_of_the_trainers_own_routers(family: str) -> None:
    trainer = tiny_trainer(family, seed=1)
    engine = start_engine(trainer.model, weights=True, record_routes=True)
    try:
        requests = ragged_requests(want_routes=True)
        completions = run(engine, requests)
        sequences = sequences_of(requests, completions)
        trained = trainer.logprobs(sequences, routes=True)
        by_path = {path: engine.score(sequences, path) for path in ("prefill", "decode")}
        for one in sequences:
            expected = trained[one.sequence_id].routes
            assert expected is not None
            assert one.routes is not None
            assert one.routes.dtype == np.uint8, "8 experts need one byte"
            found = [one.routes, *(scored[one.sequence_id].routes for scored in by_path.values())]
            for routes in found:
                np.testing.assert_array_equal(np.sort(routes, axis=-1), np.sort(expected, axis=-1))
    finally:
        engine.close()
