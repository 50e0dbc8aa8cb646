"""The sampler draws from the distribution that it reports, whatever the logits, and never an impossible id."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lockstep.records import SamplingParams
from lockstep.rollout.random_stream import as_seed, uniforms
from lockstep.rollout.sampler import SamplingBatch, sample, truncate

ANY_LENGTH = SamplingParams(max_new_tokens=1)
NUM_DRAWS = 6000


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """``count`` independent draws from one row of logits: ids and log-probs."""
    ids, logprobs = [], []
    for start in range(0, count, 2000):
        rows = min(2000, count - start)
        counters = np.arange(start, start + rows, dtype=np.uint64)
        numbers = uniforms(np.full(rows, as_seed(seed)), counters)
        drawn = sample(logits.expand(rows, -1), SamplingBatch.of([params] * rows), numbers)
        assert drawn.valid.all()
        ids.append(drawn.tokens.numpy())
        logprobs.append(drawn.logprobs.numpy())
    return np.concatenate(ids), np.concatenate(logprobs)


def one(logits: list[float], params: SamplingParams, number: float) -> tuple[int, float, bool]:
    drawn = sample(torch.tensor([logits]), SamplingBatch.of([params]), np.array([number]))
    return int(drawn.tokens[0]), float(drawn.logprobs[0]), bool(drawn.valid[0])


def peaked(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(49152, generator=generator) * 6


def flat(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(49152, generator=generator) * 0.01


def mostly_impossible(generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn(49152, generator=generator)
    logits[torch.rand(49152, generator=generator) < 0.9] = -torch.inf
    return logits


def at_the_borders(generator: torch.Generator) -> torch.Tensor:
    """Mass only on ids next to block borders and at both ends of the vocabulary."""
    logits = torch.full((49152,), -torch.inf)
    ids = [0, 255, 256, 511, 512, 24575, 24576, 49151]
    logits[ids] = torch.randn(len(ids), generator=generator)
    return logits


def chi_square_pvalue(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square over the whole vocabulary: ids with 5 expected draws or more alone, the others in cells of about 5."""
    rare = np.flatnonzero((expected < 5) & (expected > 0))
    cell = np.cumsum(expected[rare]) // 5
    cell = np.minimum(cell, max(cell[-1] - 1, 0) if len(cell) else 0).astype(int)  # no short cell at the end
    expected_cells = np.concatenate([expected[expected >= 5], np.bincount(cell, weights=expected[rare])])
    observed_cells = np.concatenate([observed[expected >= 5], np.bincount(cell, weights=observed[rare])])
    # A few rare ids may not fill a cell: they go to the likeliest id.
    small = (expected_cells < 5) & (np.arange(len(expected_cells)) > 0)
    expected_cells[0] += expected_cells[small].sum()
    observed_cells[0] += observed_cells[small].sum()
    expected_cells, observed_cells = expected_cells[~small], observed_cells[~small]
    assert observed_cells.sum() == observed.sum(), "draws outside the support"
    statistic = ((observed_cells - expected_cells) ** 2 / expected_cells).sum()
    return float(stats.chi2.sf(statistic, len(expected_cells) - 1))


@pytest.mark.parametrize("make", [peaked, flat, mostly_impossible, at_the_borders])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_follow_the_softmax_over_the_whole_vocabulary(make, temperature):
    logits = make(torch.Generator().manual_seed(7))
    ids, _ = draw_many(logits, SamplingParams(max_new_tokens=1, temperature=temperature), NUM_DRAWS)
    expected = (logits.double() / temperature).softmax(0).numpy() * NUM_DRAWS
    assert chi_square_pvalue(np.bincount(ids, minlength=len(logits)), expected) > 1e-4


def test_the_chi_square_rejects_a_slightly_wrong_temperature():
    """The test above has power: draws at temperature 1 don't pass for draws at 1.1."""
    logits = peaked(torch.Generator().manual_seed(7))
    ids, _ = draw_many(logits, ANY_LENGTH, NUM_DRAWS)
    expected = (logits.double() / 1.1).softmax(0).numpy() * NUM_DRAWS
    assert chi_square_pvalue(np.bincount(ids, minlength=len(logits)), expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
def test_logprobs_are_those_of_the_tempered_softmax_in_float64(dtype, temperature):
    logits = (torch.randn(33, 49152, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    params = SamplingParams(max_new_tokens=1, temperature=temperature)
    drawn = sample(logits, SamplingBatch.of([params] * 33), np.linspace(0.01, 0.99, 33))
    reference = (logits.double() / temperature).log_softmax(1).gather(1, drawn.tokens[:, None])[:, 0]
    assert (drawn.logprobs.double() - reference).abs().max() < 3e-6
    assert drawn.logprobs.dtype == torch.float32


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 1000, 49152])
@pytest.mark.parametrize("number", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_ids_stay_in_range_at_both_ends_of_the_interval(vocabulary, number):
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    drawn = sample(logits, SamplingBatch.of([ANY_LENGTH] * 4), np.full(4, number))
    assert ((drawn.tokens >= 0) & (drawn.tokens < vocabulary)).all()


@pytest.mark.parametrize("number", [2.0**-53, 0.3, 1 - 2.0**-53])
@pytest.mark.parametrize("only", [0, 255, 256, 700, 999])
def test_the_only_possible_id_is_always_drawn_with_logprob_zero(only, number):
    logits = [-float("inf")] * 1000
    logits[only] = -3.0
    assert one(logits, ANY_LENGTH, number) == (only, 0.0, True)


@given(
    logits=st.lists(st.sampled_from([-float("inf"), -200.0, -80.0, -1.0, 0.0, 3.0]), min_size=1, max_size=600),
    number=st.floats(2.0**-53, 1 - 2.0**-53),
)
@settings(max_examples=200, deadline=None)
def test_an_id_of_probability_zero_is_never_drawn(logits, number):
    token, logprob, valid = one(logits, ANY_LENGTH, number)
    assert valid is any(value > -float("inf") for value in logits)
    if valid:
        assert np.exp(np.float32(logits[token]) - np.float32(max(logits))) > 0
        assert np.isfinite(logprob)


@given(logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=700), number=st.floats(1e-9, 1 - 1e-9))
@settings(max_examples=200, deadline=None)
def test_the_inverse_cdf_is_the_naive_one(logits, number):
    token, _, _ = one(logits, ANY_LENGTH, number)
    cumulated = np.cumsum(np.exp(np.float64(logits) - max(logits)))
    cumulated /= cumulated[-1]
    before = cumulated[token - 1] if token else 0.0
    assert before - 1e-6 <= number <= cumulated[token] + 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [ANY_LENGTH, SamplingParams(1, temperature=0.0), SamplingParams(1, top_k=2)])
def test_a_row_with_nan_or_infinity_is_invalid_and_its_neighbours_are_not(bad, params):
    logits = torch.zeros(3, 300)
    logits[1, 280] = bad
    drawn = sample(logits, SamplingBatch.of([params] * 3), np.full(3, 0.5))
    assert drawn.valid.tolist() == [True, False, True]


def test_a_row_that_excludes_everything_is_invalid():
    assert one([-float("inf")] * 5, ANY_LENGTH, 0.5)[2] is False


def test_greedy_takes_the_lowest_id_among_equals_and_reports_its_logprob_at_temperature_one():
    token, logprob, _ = one([1.0, 4.0, 4.0, 0.0], SamplingParams(1, temperature=0.0), 0.99)
    assert token == 1
    assert logprob == pytest.approx(float(torch.tensor([1.0, 4.0, 4.0, 0.0]).log_softmax(0)[1]), abs=1e-6)


def test_rows_of_one_batch_keep_their_own_parameters():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20, 1)
    kinds = [
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, temperature=2.0),
        SamplingParams(1, top_k=1),
        SamplingParams(1, top_k=2),
    ]
    drawn = sample(logits, SamplingBatch.of(kinds * 5), np.full(20, 0.05))
    assert drawn.tokens.tolist() == [2, 0, 2, 1] * 5
    expected = [
        float(torch.tensor([0.0, 1.0, 2.0]).log_softmax(0)[2]),
        float(torch.tensor([0.0, 0.5, 1.0]).log_softmax(0)[0]),
        0.0,
        float(torch.tensor([1.0, 2.0]).log_softmax(0)[0]),
    ]
    np.testing.assert_allclose(drawn.logprobs.numpy(), expected * 5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_one_memory_stay_as_they_are_when_one_of_them_is_cut(dtype):
    """A group's first tokens are drawn from one row of logits, expanded: the cut of one sample is nobody else's."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=dtype)
    before = logits.clone()
    kinds = [SamplingParams(1, top_k=1), ANY_LENGTH, SamplingParams(1, top_p=0.5), ANY_LENGTH]
    drawn = sample(logits.expand(4, -1), SamplingBatch.of(kinds), np.full(4, 0.01))
    assert drawn.tokens.tolist() == [3, 0, 3, 0]
    whole = float(torch.tensor([0.0, 1.0, 2.0, 3.0]).log_softmax(0)[0])
    np.testing.assert_allclose(drawn.logprobs.numpy(), [0.0, whole, 0.0, whole], atol=1e-6)
    assert torch.equal(logits, before)


def test_a_greedy_row_is_reported_uncut_whatever_else_it_asks_for():
    logits = [1.0, 4.0, 3.5, 0.0]
    expected = float(torch.tensor(logits).log_softmax(0)[1])
    for cut in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.99}):
        token, logprob, _ = one(logits, SamplingParams(1, temperature=0.0, **cut), 0.5)
        assert (token, logprob) == (1, pytest.approx(expected, abs=1e-6))


def naive_kept(logits: list[float], params: SamplingParams) -> set[int]:
    """Ids kept by top-k, then top-p, then min-p, one id at a time."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]
    mass = np.exp(np.float64([logits[i] for i in order]) - logits[order[0]])
    probabilities = mass / mass.sum()
    kept, total = [], 0.0
    for index, probability in zip(order, probabilities, strict=True):
        if kept and total >= params.top_p:
            break
        kept.append(index)
        total += probability
    return {i for i, p in zip(kept, probabilities, strict=False) if p >= params.min_p * probabilities[0]}


@given(
    logits=st.lists(st.integers(-64, 64).map(lambda i: i / 8), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.3, 0.777, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.23, 0.9]),
)
@settings(max_examples=300, deadline=None)
def test_truncation_keeps_what_the_naive_definition_keeps(logits, top_k, top_p, min_p):
    params = SamplingParams(1, top_k=top_k, top_p=top_p, min_p=min_p)
    cut = truncate(torch.tensor(logits), params)
    assert {int(i) for i in torch.nonzero(cut > -torch.inf)[:, 0]} == naive_kept(logits, params)


@given(
    logits=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=300),
    params=st.builds(
        SamplingParams,
        max_new_tokens=st.just(1),
        temperature=st.sampled_from([0.5, 1.0, 1.7]),
        top_k=st.integers(0, 20),
        top_p=st.sampled_from([0.4, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.1]),
    ),
    number=st.floats(1e-9, 1 - 1e-9),
)
@settings(max_examples=200, deadline=None)
def test_truncated_draws_report_the_renormalised_logprob(logits, params, number):
    token, logprob, _ = one(logits, params, number)
    scaled = torch.tensor(logits) / params.temperature if params.temperature != 1 else torch.tensor(logits)
    kept = naive_kept(scaled.tolist(), params)
    assert token in kept
    reference = scaled[sorted(kept)].double().log_softmax(0)[sorted(kept).index(token)]
    assert logprob == pytest.approx(float(reference), abs=1e-5)


def test_the_random_stream_depends_on_seed_and_index_alone():
    seeds = np.array([as_seed(s) for s in (3, 4, 3, -1)])
    together = uniforms(seeds, np.array([0, 0, 9, 0], dtype=np.uint64))
    alone = [uniforms(seeds[i : i + 1], np.array([n], dtype=np.uint64))[0] for i, n in enumerate((0, 0, 9, 0))]
    assert together.tolist() == alone
    assert len(set(together.tolist())) == 4


def test_the_random_stream_is_uniform_and_uncorrelated_across_neighbouring_seeds_and_indices():
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    indices = np.tile(np.arange(200, dtype=np.uint64), 200)
    numbers = uniforms(seeds, indices)
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    grid = numbers.reshape(200, 200)
    for base, shifted in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(base.ravel(), shifted.ravel())[0, 1]) < 0.025
    assert numbers.min() > 0
    assert numbers.max() < 1
