"""Hysteresis, drift, several bounds, corrections: what the gate makes of a sequence of steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence as Seq

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.agreement import Agreement
from lockstep.config.schema import AlgorithmConfig, BoundConfig, CorrectionConfig, GateConfig
from lockstep.parity.gate import Gate, Verdict

SEVERITY = {"pass": 0, "warn": 1, "correct": 2, "stop": 3}
TIS = CorrectionConfig(weight="tis")


def agreement(value: float = 0.0, tokens: int = 100, nonfinite: int = 0, **metrics: float) -> Agreement:
    """A measurement of the given ``abs_diff/mean``; further metrics by name."""
    values = {"abs_diff/mean": value} | metrics if tokens else {}
    return Agreement(values, tokens, 0, nonfinite, None, None, {})


def gate(bound: float = 1.0, **changes) -> Gate:
    config = GateConfig(bounds=(BoundConfig(bound=bound, evidence="test", shown=True),), **changes)
    return Gate(config, config.bounds)


def statuses(judge: Gate, values: Seq[float], tokens: int = 100) -> list[str]:
    return [judge.judge(agreement(value, tokens), step).status for step, value in enumerate(values, 1)]


def test_one_breach_warns_and_a_second_one_within_the_window_stops() -> None:
    assert statuses(gate(window=3), [0.5, 1.2, 0.5, 0.5, 1.2, 0.5, 1.2]) == [*["pass", "warn", "pass"] * 2, "stop"]
    assert statuses(gate(breaches=1), [1.01]) == ["stop"]
    assert statuses(gate(breaches=3), [1.2, 1.2, 1.2]) == ["warn", "warn", "stop"]


def test_a_value_far_above_the_bound_stops_at_once_if_enough_tokens_are_behind_it() -> None:
    assert statuses(gate(), [2.01], tokens=32) == ["stop"]
    assert statuses(gate(), [2.0], tokens=32) == ["warn"]
    assert statuses(gate(), [50.0], tokens=10) == ["warn"], "one odd batch of ten tokens"
    assert statuses(gate(), [50.0, 0.5, 50.0], tokens=10)[-1] == "stop", "not a second one"
    assert statuses(gate(far_factor=10.0), [9.0]) == ["warn"]


def test_a_run_that_is_back_within_its_bound_passes_however_many_breaches_the_window_holds() -> None:
    assert statuses(gate(action="warn"), [1.5, 1.5, 1.5, 0.9]) == ["warn", "warn", "warn", "pass"]


def test_a_breach_says_how_often_and_where_the_bound_comes_from() -> None:
    sentence = gate().judge(agreement(1.2, 50), 4).sentence
    assert sentence.startswith("step 4: abs_diff/mean 1.2 is above the bound 1 over 50 tokens, breach 1 in 8 judged")
    assert "of which 2 are a failure" in sentence
    assert "(bound from: test)" in sentence
    far = gate().judge(agreement(5.0, 50), 4).sentence
    assert "over 50 tokens, far above it" in far


def test_slow_drift_is_caught_against_the_first_steps_within_the_bound() -> None:
    healthy = [0.010, 0.012, 0.009, 0.011, 0.010, 0.010, 0.011, 0.009]
    judge = gate()
    assert statuses(judge, healthy) == ["pass"] * 8
    drifting = [0.010 * 1.15**i for i in range(1, 25)]
    result = statuses(judge, drifting)
    first = result.index("stop")
    assert set(result[:first]) == {"pass"}
    assert 0.04 < drifting[first] < 0.2 < judge.bounds[0].bound, "long before the absolute bound"
    sentence = judge.judge(agreement(drifting[-1]), 33).sentence
    assert (
        "is within the bound 1 over 100 tokens, but the run drifts: the median of the last 8 judged steps" in sentence
    )
    assert "4 × 0.01, the median of the first 8" in sentence
    assert "loaded afresh" in sentence
    assert set(statuses(gate(baseline_steps=0), healthy + drifting)) == {"pass"}


def test_single_odd_steps_are_no_drift_and_neither_is_agreement_that_gets_better() -> None:
    values = [0.010] * 8 + [0.010, 0.5, 0.010, 0.6, 0.010, 0.5, 0.010, 0.010]
    assert set(statuses(gate(), values)) == {"pass"}
    assert set(statuses(gate(), [0.05 * 0.9**i for i in range(60)])) == {"pass"}
    odd_start = [0.9, 0.010, 0.012, 0.9, 0.010, 0.011, 0.009, 0.010]
    assert statuses(gate(), odd_start + [0.06] * 8)[-1] == "stop", (
        "the baseline is a median: odd first steps count little"
    )


def test_a_drift_is_judged_after_a_whole_baseline_and_a_whole_window_and_at_a_value_that_is_off() -> None:
    values = [0.01, 0.01, 0.1, 0.1, 0.1, 0.1]
    assert statuses(gate(baseline_steps=2, window=6), values) == [*["pass"] * 5, "stop"], "six judged steps"
    assert statuses(gate(baseline_steps=2, window=3), values) == [*["pass"] * 3, "stop", "stop", "stop"]
    values = [0.01, 0.01, 0.01, 0.01, 0.1, 0.1]
    assert statuses(gate(baseline_steps=6, window=1), values) == [*["pass"] * 5, "stop"], "a baseline of six steps"
    assert statuses(gate(), [0.01] * 8 + [0.1] * 3 + [0.01]) == ["pass"] * 12
    assert statuses(gate(action="warn"), [0.01] * 8 + [0.1] * 8 + [0.01])[-2:] == ["warn", "pass"], "it is back"
    four = [0.25] * 8 + [1.0] * 8  # four times the baseline, and not above it
    assert set(statuses(gate(bound=9.0), [*four, 2.0])) == {"pass"}
    assert statuses(gate(bound=9.0), [*four, *[2.0] * 5, 1.0])[-2:] == ["stop", "pass"]


def test_a_breach_on_top_of_a_drift_is_a_failure() -> None:
    judge = gate(action="warn", breaches=8)
    statuses(judge, [0.01] * 8 + [0.1] * 8)
    verdict = judge.judge(agreement(1.2), 17)
    assert verdict.status == "warn"
    stopping = gate(breaches=8)
    stopping.load_state(judge.state() | {"histories": {"abs_diff/mean": {"first": [0.01] * 8, "recent": [0.1] * 8}}})
    assert stopping.judge(agreement(1.2), 17).status == "stop"
    healthy = gate(breaches=8)
    healthy.load_state(judge.state() | {"histories": {"abs_diff/mean": {"first": [0.01] * 8, "recent": [0.01] * 8}}})
    assert healthy.judge(agreement(1.2), 17).status == "warn"


def test_a_value_at_the_bound_is_no_breach_that_counts_later() -> None:
    assert statuses(gate(), [1.0, 1.2, 1.0, 1.2]) == ["pass", "warn", "pass", "stop"]


def test_a_drift_is_never_far_so_a_correction_that_is_on_stays() -> None:
    judge = gate(action="correct", correction=TIS, breaches=1)
    assert statuses(judge, [1.5] + [0.01] * 7)[0] == "correct"
    assert statuses(judge, [0.1] * 8)[-1] == "correct"


def test_first_steps_that_agree_bit_for_bit_are_no_baseline_for_a_drift() -> None:
    judge = gate()
    assert set(statuses(judge, [0.0] * 8 + [1e-6] * 16)) == {"pass"}
    assert statuses(judge, [1.5, 1.5]) == ["warn", "stop"], "the bound goes on judging"
    assert set(statuses(gate(), [0.0] * 5 + [1e-6] * 19)) == {"pass"}, "a median of 0, though some steps are not"
    assert statuses(gate(), [0.0] * 3 + [1e-9] * 5 + [1e-6] * 8)[-1] == "stop", "a small median is a baseline"


def two_metrics(**changes) -> Gate:
    mean = BoundConfig(bound=1.0, evidence="mean's", shown=True)
    k3 = BoundConfig(metric="k3", bound=0.1, evidence="k3's")
    config = GateConfig(bounds=(mean, k3), **changes)
    return Gate(config, config.bounds)


def test_several_metrics_are_bounded_at_once_and_the_worst_decides() -> None:
    passed = two_metrics().judge(agreement(0.5, k3=0.05), 1)
    assert (passed.status, passed.metric, passed.bound) == ("pass", "abs_diff/mean", 1.0)
    assert "k3 0.05 within 0.1" in passed.sentence
    failed = two_metrics().judge(agreement(0.5, k3=0.3), 1)
    assert (failed.status, failed.metric, failed.value, failed.bound) == ("stop", "k3", 0.3, 0.1)
    both = two_metrics().judge(agreement(3.0, k3=0.15), 1)
    assert (both.status, both.metric) == ("stop", "abs_diff/mean"), "a failure is worse than a breach"
    judge = two_metrics()
    assert judge.judge(agreement(1.2, k3=0.05), 1).status == "warn"
    assert judge.judge(agreement(0.5, k3=0.12), 2).status == "warn", "breaches of different metrics don't add up"


def test_of_several_metrics_at_the_same_level_the_larger_share_of_its_bound_decides() -> None:
    assert two_metrics().judge(agreement(1.2, k3=0.19), 1).metric == "k3"
    assert two_metrics().judge(agreement(1.9, k3=0.12), 1).metric == "abs_diff/mean"
    assert two_metrics().judge(agreement(3.0, k3=0.9), 1).metric == "k3"


def test_a_bound_that_was_not_shown_here_says_so() -> None:
    verdict = two_metrics().judge(agreement(0.5, k3=0.3), 1)
    assert verdict.evidence == "k3's; not shown on this hardware"
    assert "(bound from: k3's; not shown on this hardware)" in verdict.sentence
    assert verdict.flat()["verdict/evidence"] == verdict.evidence
    assert two_metrics().judge(agreement(3.0, k3=0.0), 1).evidence == "mean's"


def test_a_gate_without_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="pass everything"):
        Gate(GateConfig(bounds=()), ())


def test_correct_switches_the_correction_on_from_the_next_step() -> None:
    judge, configured = gate(action="correct", correction=TIS), AlgorithmConfig(group_size=4)
    assert statuses(judge, [0.5, 1.5]) == ["pass", "warn"]
    assert judge.algorithm(configured) == configured
    verdict = judge.judge(agreement(1.5), 3)
    assert (verdict.status, verdict.correcting_since) == ("correct", 4)
    assert "correction tis is on from the next step" in verdict.sentence
    assert judge.algorithm(configured) == configured.model_copy(update={"corrections": TIS})
    later = judge.judge(agreement(0.5), 4)
    assert later.status == "pass"
    assert later.sentence.endswith("correction tis is on since step 4")
    assert later.flat()["verdict/correcting_since"] == 4
    assert judge.judge(agreement(1.5), 5).status == "correct", "a mismatch that stays is what the correction is for"
    far = judge.judge(agreement(2.5), 6)
    assert far.status == "stop"
    assert "not made for" in far.sentence


def test_a_non_finite_value_stops_whatever_the_action() -> None:
    for action in ("stop", "warn", "correct"):
        correction = TIS if action == "correct" else CorrectionConfig()
        judge = gate(bound=1e6, action=action, correction=correction)
        assert judge.judge(agreement(0.0, nonfinite=1), 1).status == "stop"
        assert judge.judge(agreement(math.nan), 1).status == "stop"
        assert judge.judge(agreement(math.inf), 1).status == "stop"
        assert judge.judge(agreement(tokens=0, nonfinite=1), 1).status == "stop"
        assert judge.state()["histories"]["abs_diff/mean"] == {"first": [], "recent": []}


# --- properties -------------------------------------------------------------------------------------------------------

VALUES = st.floats(0, 10, allow_subnormal=False)
STEP = st.tuples(VALUES, st.sampled_from([0, 10, 31, 32, 500]), st.sampled_from([0, 0, 0, 0, 0, 1]))
CONFIGS = st.builds(
    lambda window, breaches, **rest: {"window": window, "breaches": min(breaches, window), **rest},
    window=st.integers(1, 5),
    breaches=st.integers(1, 5),
    far_factor=st.floats(1, 4),
    baseline_steps=st.integers(0, 4),
    drift_factor=st.floats(1.5, 5),
    unjudged_patience=st.integers(1, 4),
    action=st.sampled_from(["stop", "warn"]),
) | st.just({"action": "correct", "correction": TIS, "window": 3})


def run_steps(judge: Gate, steps: Seq[tuple[float, int, int]], start: int = 0) -> list[Verdict]:
    return [judge.judge(agreement(*step), number) for number, step in enumerate(steps, start + 1)]


@settings(max_examples=200, deadline=None)
@given(CONFIGS, st.lists(STEP, max_size=12), VALUES, VALUES, st.sampled_from([10, 500]))
def test_after_any_history_a_larger_value_never_gets_the_milder_verdict(config, steps, one, other, tokens) -> None:
    verdicts = []
    for value in sorted((one, other)):
        judge = gate(**config)
        run_steps(judge, steps)
        verdicts.append(judge.judge(agreement(value, tokens), 99))
    assert SEVERITY[verdicts[0].status] <= SEVERITY[verdicts[1].status]


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.lists(STEP, max_size=12), st.integers(0, 500), VALUES)
def test_after_any_history_one_non_finite_pair_stops(config, steps, tokens, value) -> None:
    judge = gate(**config)
    run_steps(judge, steps)
    assert judge.judge(agreement(value, tokens, nonfinite=1), 99).status == "stop"


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.lists(STEP, max_size=12))
def test_after_any_history_a_step_without_tokens_is_unjudged_or_stops(config, steps) -> None:
    judge = gate(**config)
    run_steps(judge, steps)
    verdict = judge.judge(agreement(tokens=0), 99)
    assert verdict.status in ("unjudged", "stop")
    assert verdict.value is None


@settings(max_examples=200, deadline=None)
@given(CONFIGS, st.lists(STEP, max_size=16), st.integers(0, 16))
@example({"action": "correct", "correction": TIS, "window": 3}, [(1.5, 100, 0)] * 4, 2)
def test_a_resume_at_any_step_gives_the_same_verdicts(config, steps, cut) -> None:
    straight = gate(**config)
    expected = run_steps(straight, steps)
    before, after = gate(**config), gate(**config)
    run_steps(before, steps[:cut])
    after.load_state(json.loads(json.dumps(before.state())))
    assert run_steps(after, steps[cut:], start=min(cut, len(steps))) == expected[cut:]
    assert after.state() == straight.state()


def test_a_state_of_something_else_is_refused_and_a_new_metric_starts_anew() -> None:
    judge = gate()
    statuses(judge, [0.1, 0.2])
    more = two_metrics()
    more.load_state(judge.state())
    assert more.state()["histories"] == {
        "abs_diff/mean": {"first": [0.1, 0.2], "recent": [0.1, 0.2]},
        "k3": {"first": [], "recent": []},
    }
    for wrong in ({}, {"num_unjudged_in_row": 0}, judge.state() | {"histories": {"abs_diff/mean": {}}}):
        with pytest.raises(KeyError):
            gate().load_state(wrong)
    broken = judge.state() | {"histories": {"abs_diff/mean": {"first": [math.nan], "recent": []}}}
    with pytest.raises(ValueError, match="not finite"):
        gate().load_state(broken)
