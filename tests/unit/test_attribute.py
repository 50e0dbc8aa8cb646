"""The search for a cause, on made-up scores: no model, every rule of the search on its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.parity.attribute import Attribution, Factor, Names, Scores, attribute, sentence
from lockstep.parity.bootstrap import METRICS, interval, metric_value, resampled

BOUND = 0.05


def factors(*names: str) -> list[Factor]:
    return [Factor(name, f"changes {name}") for name in names]


def scores(mean: float, num_rollouts: int = 32, seed: int = 0, nonfinite: int = 0, seconds: float = 1.0) -> Scores:
    """Rollouts of 20 tokens whose mean \\|d\\| is ``mean``, with the same noise for the same seed."""
    rng = np.random.default_rng(seed)
    raw = [rng.exponential(size=20) * rng.choice([-1, 1], size=20) for _ in range(num_rollouts)]
    scale = mean / np.abs(np.concatenate(raw)).mean()
    return Scores(tuple(d * scale for d in raw), nonfinite, seconds, 640)


class Counted:
    """An evaluator from a rule, that counts its calls and refuses to be asked twice for the same."""

    def __init__(self, rule: Callable[[Names], float | Scores]) -> None:
        self.rule, self.asked = rule, []

    def __call__(self, names: Names) -> Scores:
        assert names not in self.asked, f"{names} was evaluated twice"
        self.asked.append(names)
        value = self.rule(names)
        return value if isinstance(value, Scores) else scores(value)


def minimal(result: Attribution) -> set[Names]:
    return set(result.minimal)


def test_the_public_case_needs_both_and_says_what_each_does_alone() -> None:
    values = {(): 0.21290, ("scale",): 0.13108, ("norm",): 0.16284, ("norm", "scale"): 0.04510}
    evaluate = Counted(lambda names: values[tuple(sorted(names & {"scale", "norm"}))])
    result = attribute(evaluate, factors("scale", "norm", "decoy"), BOUND)
    assert minimal(result) == {frozenset({"scale", "norm"})}
    assert sentence(result).startswith(
        "neither alone suffices: 0.2129 → 0.1628 with norm, 0.1311 with scale alone, 0.0451 together"
    )
    both = next(one for one in result.interactions if {one.first, one.second} == {"scale", "norm"})
    assert both.excess == pytest.approx((0.2129 - 0.0451) - (0.2129 - 0.13108) - (0.2129 - 0.16284))
    assert both.noise is not None
    assert not both.noise.holds_zero
    decoy = result.trial("decoy")
    assert decoy is not None
    assert decoy.judgement == "noise"


def test_every_single_factor_that_restores_is_named() -> None:
    result = attribute(Counted(lambda names: 0.01 if names & {"b", "d"} else 0.3), factors(*"abcd"), BOUND)
    assert minimal(result) == {frozenset("b"), frozenset("d")}
    assert result.status == "explained"


def test_a_healthy_agreement_costs_one_run() -> None:
    evaluate = Counted(lambda names: 0.02)
    result = attribute(evaluate, factors(*"abc"), BOUND)
    assert result.status == "healthy"
    assert len(evaluate.asked) == 1
    assert "nothing to explain" in sentence(result)


def test_a_cause_outside_the_factors_is_unexplained_with_what_was_reached() -> None:
    result = attribute(Counted(lambda names: 0.2 if "a" in names else 0.3), factors(*"abc"), BOUND)
    assert result.status == "unexplained"
    assert result.minimal == ()
    assert "at best 0.2 (a)" in sentence(result)
    alone = attribute(Counted(lambda names: 0.3), factors(*"abc"), BOUND)
    assert alone.status == "unexplained"
    assert "none of them lowers it beyond noise" in sentence(alone)


def test_the_budget_is_honoured_and_an_unfinished_search_does_not_claim_to_be_one() -> None:
    names = [f"f{i}" for i in range(30)]
    evaluate = Counted(lambda chosen: 0.01 if {"f3", "f17", "f29"} <= chosen else 0.3)
    result = attribute(evaluate, factors(*names), BOUND, budget=6)
    assert len(evaluate.asked) == 6
    assert result.status == "undecided"
    assert "undecided after 6 runs" in sentence(result)


def test_delta_debugging_finds_two_of_sixty_without_trying_each_alone() -> None:
    names = [f"f{i}" for i in range(60)]
    evaluate = Counted(lambda chosen: 0.01 if {"f3", "f47"} <= chosen else 0.3)
    result = attribute(evaluate, factors(*names), BOUND, budget=45)
    assert minimal(result) == {frozenset({"f3", "f47"})}
    short = attribute(Counted(evaluate.rule), factors(*names), BOUND, budget=12)
    assert short.status == "undecided"
    assert "restore it, fewer may do" in sentence(short)


def test_a_harmful_factor_does_not_hide_the_set_that_restores() -> None:
    def rule(names: Names) -> float:
        if "bad" in names:
            return 0.9
        return 0.01 if {"a", "b"} <= names else 0.3

    result = attribute(Counted(rule), factors("bad", "a", "b", "c"), BOUND)
    assert minimal(result) == {frozenset("ab")}
    assert result.trial("bad").judgement == "worsens"  # pyright: ignore[reportOptionalMemberAccess]


def test_two_faults_that_partly_cancel_are_found_although_one_repair_alone_makes_it_worse() -> None:
    values = {frozenset(): 0.1, frozenset("a"): 0.3, frozenset("b"): 0.1, frozenset("ab"): 0.01}
    result = attribute(
        Counted(lambda names: values[names & frozenset("ab")] + 0.2 * ("c" in names)), factors(*"abc"), BOUND
    )
    assert minimal(result) == {frozenset("ab")}


def test_one_value_that_is_not_finite_keeps_a_small_mean_from_being_healthy() -> None:
    result = attribute(
        Counted(lambda names: scores(0.01, nonfinite=0 if "a" in names else 3)), factors("a", "b"), BOUND
    )
    assert result.status == "explained"
    assert minimal(result) == {frozenset("a")}
    assert "3 tokens not finite" in sentence(result)


def test_the_parts_of_a_factor_are_searched_only_after_the_whole_restored() -> None:
    layers = tuple(Factor(f"layer {i}", "one layer") for i in range(30))
    whole = Factor("load", "all weights", parts=layers)
    evaluate = Counted(lambda names: 0.01 if names & {"load", "layer 11"} else 0.3)
    result = attribute(evaluate, [*factors("x", "y"), whole], BOUND, budget=25)
    assert result.refined == {"load": frozenset({"layer 11"})}
    assert "of it layer 11 is enough" in sentence(result)
    assert len(evaluate.asked) < 20
    blind = Counted(lambda names: 0.3)
    attribute(blind, [*factors("x", "y"), whole], BOUND)
    assert not any("layer" in name for names in blind.asked for name in names)


def test_the_full_factorial_runs_only_when_asked_and_covered() -> None:
    evaluate = Counted(lambda names: 0.01 if len(names) >= 2 else 0.3)
    result = attribute(evaluate, factors(*"abc"), BOUND, budget=8, full=True)
    assert len(evaluate.asked) == 8
    assert minimal(result) == {frozenset("ab"), frozenset("ac"), frozenset("bc")}
    with pytest.raises(ValueError, match="16 runs, the budget is 8"):
        attribute(evaluate, factors(*"abcd"), BOUND, budget=8, full=True)


def test_throughput_prices_are_shares_of_the_unchanged_speed() -> None:
    result = attribute(
        Counted(lambda names: scores(0.01 if names else 0.3, seconds=1.25 if names else 1.0)), factors("a"), BOUND
    )
    assert result.trial("a").price == pytest.approx(0.2)  # pyright: ignore[reportOptionalMemberAccess]
    assert result.unchanged.tokens_per_s == pytest.approx(640)


def test_an_effect_within_the_noise_of_the_rollouts_is_called_noise() -> None:
    """Many rollouts are a little better and a few much worse: the means differ by 3 %, which this batch can't tell."""
    rng = np.random.default_rng(1)
    before = [np.full(10, 0.3) for _ in range(24)]
    after = [np.full(10, 0.3 + shift) for shift in rng.normal(-0.009, 0.15, size=24)]
    cases = {frozenset(): Scores(tuple(before)), frozenset("a"): Scores(tuple(after))}
    result = attribute(lambda names: cases[names], factors("a"), BOUND)
    trial = result.trial("a")
    assert trial is not None
    assert trial.noise is not None
    assert trial.noise.holds_zero
    assert trial.judgement == "noise"


def test_a_tiny_effect_in_every_rollout_is_no_cause_however_sure_it_is() -> None:
    result = attribute(Counted(lambda names: 0.3 - 0.0003 * len(names)), factors("a"), BOUND)
    assert result.trial("a").judgement == "noise"  # pyright: ignore[reportOptionalMemberAccess]


def test_a_value_just_above_the_bound_is_not_explained_by_what_moves_it_a_little() -> None:
    """0.0505 fails a bound of 0.05, and anything that moves it by 1 % seems to restore it."""
    result = attribute(Counted(lambda names: 0.0505 - 0.0007 * ("a" in names)), factors("a", "b"), BOUND)
    assert result.trial("a").value < BOUND  # pyright: ignore
    assert result.trial("a").judgement == "noise"  # pyright: ignore[reportOptionalMemberAccess]
    assert result.status == "unexplained"
    assert "none of them lowers it beyond noise" in sentence(result)
    told = attribute(Counted(lambda names: 0.0505 - 0.02 * ("a" in names)), factors("a", "b"), BOUND)
    assert minimal(told) == {frozenset("a")}


def test_below_the_bound_by_chance_is_noise_and_by_a_fault_in_one_rollout_it_is_not() -> None:
    rng = np.random.default_rng(2)
    before = [np.full(10, 0.052) for _ in range(24)]
    shifts = rng.uniform(-0.04, 0.04, size=24)
    after = [np.full(10, 0.0495 + shift) for shift in shifts - shifts.mean()]
    cases = {frozenset(): Scores(tuple(before)), frozenset("a"): Scores(tuple(after))}
    by_chance = attribute(lambda names: cases[names], factors("a"), BOUND)
    assert by_chance.trial("a").value < BOUND  # pyright: ignore
    assert by_chance.status == "unexplained"
    healthy = [np.full(10, 0.001) for _ in range(8)]
    cases = {frozenset(): Scores((np.full(10, 1.0), *healthy[1:])), frozenset("a"): Scores(tuple(healthy))}
    one = attribute(lambda names: cases[names], factors("a"), BOUND)
    assert one.trial("a").noise.holds_zero  # pyright: ignore[reportOptionalMemberAccess]
    assert one.status == "explained"


def test_a_single_rollout_has_no_noise_estimate() -> None:
    result = attribute(lambda names: scores(0.01 if names else 0.3, num_rollouts=1), factors("a"), BOUND)
    assert result.trial("a").noise is None  # pyright: ignore[reportOptionalMemberAccess]
    assert result.status == "explained"


@pytest.mark.parametrize(
    ("given_factors", "budget", "message"), [(factors("a", "a"), 9, "share a name"), (factors("a"), 1, "budget of 1")]
)
def test_bad_input_is_refused(given_factors: list[Factor], budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attribute(lambda names: scores(0.3), given_factors, BOUND, budget)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(4, 60), st.data())
def test_what_is_found_restores_and_no_member_can_be_left_out(num: int, budget: int, data: st.DataObject) -> None:
    names = [f"f{i}" for i in range(num)]
    needed = frozenset(data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)))
    evaluate = Counted(lambda chosen: scores(0.01 if needed <= chosen else 0.3, num_rollouts=2))
    result = attribute(evaluate, factors(*names), BOUND, budget)
    assert len(evaluate.asked) <= budget
    assert result.status in ("explained", "undecided")
    if result.status == "explained":
        assert minimal(result) == {needed}


@pytest.mark.parametrize("metric", METRICS)
def test_resampled_metrics_are_those_of_the_drawn_rollouts(metric: str) -> None:
    rng = np.random.default_rng(3)
    case = [rng.normal(0, 0.1, size=size) for size in (5, 1, 9, 4)]
    draws = np.random.default_rng(0).multinomial(4, np.full(4, 0.25), size=500)
    found = resampled(metric, [case])[0]
    for index in (0, 17, 499):
        drawn = np.concatenate([d for d, times in zip(case, draws[index], strict=True) for _ in range(times)])
        expected = {
            "abs_diff/mean": np.abs(drawn).mean(),
            "abs_diff/p50": np.median(np.abs(drawn)),
            "abs_diff/p99": np.quantile(np.abs(drawn), 0.99),
            "mult_error": np.exp(np.abs(drawn)).mean(),
            "abs_diff/max": np.abs(drawn).max(),
            "k3": (np.exp(drawn) - 1 - drawn).mean(),
        }[metric]
        assert found[index] == pytest.approx(expected, rel=1e-9)
        assert metric_value(metric, drawn) == pytest.approx(expected, rel=1e-9)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """99 % intervals of a mean of 40 rollouts: at least 95 of 100 hold it (a bootstrap is a little narrow)."""
    rng = np.random.default_rng(5)
    held = 0
    for trial in range(100):
        before = [np.abs(rng.normal(0, 1, size=6)) for _ in range(40)]
        after = [d + rng.normal(0.0, 0.2) for d in before]
        draws = resampled("abs_diff/mean", [before, after], seed=trial)
        held += interval(draws[0] - draws[1]).holds_zero
    assert held >= 95
