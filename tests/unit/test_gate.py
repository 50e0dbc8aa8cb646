"""Verdicts, from records of a step through the measure to the sentence."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from lockstep.config.schema import BoundConfig, GateConfig
from lockstep.interfaces import LogProbs
from lockstep.parity.gate import Gate
from lockstep.parity.measure import judgeable, measure_scores, measure_step, token_context
from lockstep.records import Problem, Rollout, Score, Sequence, TrainSequence


def make_rollouts(num: int = 3, sampled: int = 4, version: int = 2, replicas: int = 1) -> list[Rollout]:
    rollouts = []
    for i in range(num):
        mask = np.array([False, False] + [True] * sampled)
        versions = np.where(mask, version, -1).astype(np.int32)
        logprobs = np.where(mask, -1.0 - 0.1 * np.arange(len(mask)), 0.0).astype(np.float32)
        tokens = np.arange(10 * i, 10 * i + len(mask), dtype=np.int32)
        sequence = Sequence(f"s{i}", tokens, mask, logprobs, versions, versions.copy())
        rollouts.append(
            Rollout(f"r{i}", "g", Problem("g", "p", None), (sequence,), "", Score(1.0), "finished", i % replicas)
        )
    return rollouts


def trained(rollouts: list[Rollout], offset: float = 0.0) -> dict[str, np.ndarray]:
    """The trainer's log-probs: NaN where nothing was sampled, the engine's plus ``offset`` elsewhere."""
    return {
        s.sequence_id: np.where(s.loss_mask, s.logprobs + np.float32(offset), np.nan).astype(np.float32)
        for r in rollouts
        for s in r.sequences
    }


def gate(metric: str = "abs_diff/mean", bound: float = 0.01, **changes) -> Gate:
    """One bound; a value twice as large fails at once, even over the few tokens of these records."""
    limit = BoundConfig.model_validate(
        {"metric": metric, "bound": bound, "evidence": "measured on this recipe", "shown": True}
    )
    config = GateConfig(**({"bounds": (limit,), "min_tokens": 1} | changes))
    return Gate(config, config.bounds)


def test_agreement_within_the_bound_passes_and_above_it_stops_or_warns():
    rollouts = make_rollouts()
    good = measure_step(trained(rollouts, 0.005), rollouts, version=2)
    bad = measure_step(trained(rollouts, 0.05), rollouts, version=2)
    verdict = gate().judge(good, step=3)
    assert (verdict.status, verdict.tokens, verdict.bound) == ("pass", 12, 0.01)
    assert verdict.value == pytest.approx(0.005, rel=1e-3)
    assert gate().judge(bad, step=3).status == "stop"
    assert gate(action="warn").judge(bad, step=3).status == "warn"
    assert gate(metric="abs_diff/max", bound=0.06).judge(bad, step=3).status == "pass"


def test_every_bound_of_the_run_is_in_the_row():
    rollouts = make_rollouts()
    limits = [{"metric": m, "bound": b, "evidence": "seen"} for m, b in (("abs_diff/mean", 0.01), ("abs_diff/p50", 1))]
    bounds = tuple(BoundConfig.model_validate(limit) for limit in limits)
    row = Gate(GateConfig(bounds=bounds), bounds).judge(measure_step(trained(rollouts), rollouts, 2), 1).flat()
    assert (row["bound/abs_diff/mean"], row["bound/abs_diff/p50"]) == (0.01, 1.0)


def test_a_value_equal_to_the_bound_passes():
    rollouts = make_rollouts()
    agreement = measure_step(trained(rollouts, 0.05), rollouts, version=2)
    assert gate(bound=agreement.metrics["abs_diff/mean"]).judge(agreement, 0).status == "pass"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_non_finite_value_fails_whatever_the_mean(value):
    rollouts = make_rollouts(num=200)
    logprobs = trained(rollouts)
    logprobs["s7"][4] = value
    verdict = gate(bound=1000.0).judge(measure_step(logprobs, rollouts, version=2), step=1)
    assert verdict.status == "stop"
    assert verdict.value == 0.0
    assert "1 log-prob pairs are not finite" in verdict.sentence
    assert gate(bound=1000.0, action="warn").judge(measure_step(logprobs, rollouts, version=2), 1).status == "stop"
    assert "row 7, token 4" in verdict.sentence


def test_all_tokens_non_finite_is_a_failure_not_unjudged():
    rollouts = make_rollouts()
    verdict = gate().judge(measure_step(trained(rollouts, math.nan), rollouts, version=2), step=1)
    assert (verdict.status, verdict.value, verdict.tokens) == ("stop", None, 0)


def test_no_eligible_token_is_unjudged_and_patience_ends():
    """Stale only, nothing sampled, and the count starts anew after a judged step."""
    rollouts = make_rollouts(version=1)
    stale = measure_step(trained(rollouts), rollouts, version=2)
    fresh = measure_step(trained(rollouts), rollouts, version=1)
    judge = gate(unjudged_patience=2, action="warn")
    first = judge.judge(stale, 0)
    assert (first.status, first.value, first.tokens) == ("unjudged", None, 0)
    assert "12 sampled tokens are of other versions" in first.sentence
    assert judge.judge(fresh, 1).status == "pass"
    assert judge.judge(stale, 2).status == "unjudged"
    assert judge.judge(stale, 3).status == "stop"
    assert gate().judge(measure_step({}, [], version=2), 0).status == "unjudged"
    assert gate(unjudged_patience=1).judge(stale, 0).status == "stop"


@pytest.mark.parametrize("version", [1, 2])
def test_an_unjudged_step_names_its_own_reason_and_advice(version):
    """Stale, dropped and empty are three faults; each sentence speaks of one alone, whatever else is passed."""
    rollouts = make_rollouts(version=1)
    stale = measure_step(trained(rollouts), rollouts, version=2)
    empty = measure_step({}, [], version=version)
    marks = {"stale": "of other versions", "dropped": "dynamic sampling dropped", "empty": "no token was sampled"}
    advices = {"stale": "refits reach the engine", "dropped": "max_refill_rounds", "empty": "completes requests"}
    for kind, agreement, dropped in (
        ("stale", stale, 0),
        ("stale", stale, 3),
        ("dropped", empty, 1),
        ("dropped", empty, 32),
        ("empty", empty, 0),
    ):
        verdict = gate(unjudged_patience=1).judge(agreement, 1, num_dropped_groups=dropped)
        assert verdict.status == "stop"
        assert [name for name, mark in marks.items() if mark in verdict.sentence] == [kind]
        assert [name for name, advice in advices.items() if advice in verdict.sentence] == [kind]
    counted = gate(unjudged_patience=1).judge(empty, 1, num_dropped_groups=32).sentence
    assert "all 32 sampled groups" in counted


def test_dropped_groups_change_nothing_where_tokens_were_judged():
    rollouts = make_rollouts()
    agreement = measure_step(trained(rollouts), rollouts, version=2)
    assert gate().judge(agreement, 1, num_dropped_groups=5) == gate().judge(agreement, 1)


def test_tokens_that_were_not_seen_change_no_status_and_are_admitted():
    rollouts = make_rollouts()
    for offset in (0.0, 0.5):
        agreement = measure_step(trained(rollouts, offset), rollouts, version=2)
        whole, part = gate().judge(agreement, 1), gate().judge(agreement, 1, num_unseen=36)
        assert part.status == whole.status
        assert part.sentence.removeprefix(whole.sentence).startswith("; 36 sampled tokens more are not judged")


def test_the_count_of_unjudged_steps_survives_a_resume():
    rollouts = make_rollouts(version=1)
    stale = measure_step(trained(rollouts), rollouts, version=2)
    before = gate(unjudged_patience=2)
    before.judge(stale, 0)
    after = gate(unjudged_patience=2)
    after.load_state(before.state())
    assert after.judge(stale, 1).status == "stop"
    with pytest.raises(KeyError):
        after.load_state({})


def test_the_sentence_tells_metric_value_bound_tokens_worst_token_and_what_to_try():
    rollouts = make_rollouts()
    logprobs = trained(rollouts)
    logprobs["s1"][5] += 3.0
    agreement = measure_step(logprobs, rollouts, version=2)
    describe = token_context(rollouts, decode=lambda ids: "<" + " ".join(map(str, ids)) + ">", width=2)
    sentence = gate().judge(agreement, 5, describe).sentence
    for part in (
        "step 5: abs_diff/mean 0.25 is above the bound 0.01 over 12 tokens",
        "measured on this recipe",
        "sequence s1, token 5 (id 15) '<15>' after '<13 14>', trainer 1.5, engine -1.5, apart by 3;",
        "few tokens are far off",
    ):
        assert part in sentence


def test_a_difference_below_the_digits_of_both_sides_is_told():
    rollouts = make_rollouts()
    logprobs = trained(rollouts)
    logprobs["s1"][5] += 2e-6
    sentence = gate(bound=1e-9).judge(measure_step(logprobs, rollouts, version=2), 1).sentence
    assert re.search(r"trainer -1\.5, engine -1\.5, apart by (1\.9|2\.0)\d*e-06;", sentence), sentence
    logprobs["s1"][5] = math.nan
    sentence = gate(bound=1e-9).judge(measure_step(logprobs, rollouts, version=2), 1).sentence
    assert "trainer nan, engine -1.5; try:" in sentence


def test_the_advice_follows_what_stands_out():
    def sentence(change, replicas=1):
        rollouts = make_rollouts(num=6, replicas=replicas)
        logprobs = trained(rollouts)
        change(logprobs)
        return gate().judge(measure_step(logprobs, rollouts, version=2), 0).sentence

    def one_replica(logprobs):
        for name in ("s1", "s4"):
            logprobs[name] += 1.0

    def first_token(logprobs):
        for values in logprobs.values():
            values[2] += 1.0

    def everything(logprobs):
        for values in logprobs.values():
            values += 1.0

    assert "only replica 1" in sentence(one_replica, replicas=3)
    assert "only the first sampled token" in sentence(first_token)
    assert "most tokens are off" in sentence(everything, replicas=3)


def test_a_metric_that_is_missing_though_tokens_were_measured_is_an_error():
    rollouts = make_rollouts()
    agreement = measure_step(trained(rollouts), rollouts, version=2)
    del agreement.metrics["abs_diff/mean"]
    with pytest.raises(ValueError, match="no metric 'abs_diff/mean'"):
        gate().judge(agreement, 0)


# --- measure_step and measure_scores ----------------------------------------------------------------------------------


def test_the_mask_is_the_one_from_before_rejections_which_are_counted():
    """A correction that drops the bad tokens must not hide them from the gate."""
    rollouts = make_rollouts()
    logprobs = trained(rollouts)
    logprobs["s0"][3] += 5.0
    items = []
    for rollout in rollouts:
        sequence = rollout.sequences[0]
        mask = sequence.loss_mask.copy()
        mask[3] = False
        items.append(TrainSequence(sequence, rollout.rollout_id, mask, np.zeros(len(mask), dtype=np.float32)))
    agreement = measure_step(logprobs, rollouts, version=2, items=items)
    assert agreement.num_rejected == 3
    assert agreement.num_tokens == 12
    assert gate().judge(agreement, 0).status == "stop"


def test_of_rollouts_that_the_trainer_has_not_seen_only_broken_tokens_are_judged():
    """A batch of several optimizer steps is judged after the first: NaN in its later parts must not wait."""
    rollouts = make_rollouts(num=5)
    rollouts[3].sequences[0].logprobs[[1, 4]] = np.nan  # of which token 1 was not sampled
    rollouts[4].sequences[0].logprobs[1] = np.nan
    two = replace(rollouts[2], sequences=(rollouts[2].sequences[0], make_rollouts(num=9)[8].sequences[0]))
    two.sequences[1].logprobs[2] = np.inf
    seen, known = judgeable(trained(rollouts[:3]), [*rollouts[:2], two, *rollouts[3:]])
    assert [rollout.rollout_id for rollout in seen] == ["r0", "r1", "r2", "r3"]
    agreement = measure_step(known, seen, version=2)
    assert (agreement.num_tokens, agreement.num_nonfinite) == (8, 2)
    assert {(token.row, token.column) for token in agreement.worst_tokens[:2]} == {(3, 2), (4, 4)}
    healthy = make_rollouts(num=3)
    seen, known = judgeable(trained(healthy[:1]), healthy)
    assert [rollout.rollout_id for rollout in seen] == ["r0"]
    assert measure_step(known, seen, version=2).num_nonfinite == 0


def test_routes_of_a_step_are_compared_where_both_sides_have_them():
    """At the token whose log-prob the forward gave: position t−1 for token t."""
    rollouts = make_rollouts()
    routes = np.tile(np.array([[[0, 1], [2, 3]]], dtype=np.int16), (5, 1, 1))
    for rollout in rollouts[:2]:
        object.__setattr__(rollout.sequences[0], "routes", routes)
    other = routes.copy()
    other[3, 1] = [2, 7]  # the forward of position 3 gives token 4
    other[0] = 9  # gives token 1, which was not sampled
    logprobs = trained(rollouts)
    logprobs["s1"][4] += 1.0
    agreement = measure_step(logprobs, rollouts, version=2, train_routes={"s0": routes, "s1": other, "s2": routes})
    assert agreement.metrics["route_agree"] == pytest.approx(15 / 16)
    found = {label: (b.num_tokens, b.abs_diff_max) for label, b in agreement.buckets["routes"].items()}
    assert found == {"equal": (7, 0.0), "flipped": (1, pytest.approx(1.0)), "unknown": (4, 0.0)}
    assert "route_agree" not in measure_step(logprobs, rollouts, version=2, train_routes={"s2": routes}).metrics
    with pytest.raises(ValueError, match=r"sequence s0: expert ids \(4, 2, 2\), expected \(5, 2, 2\)"):
        measure_step(logprobs, rollouts, version=2, train_routes={"s0": routes[1:]})
    object.__setattr__(rollouts[1].sequences[0], "routes", routes[:, :1])
    with pytest.raises(ValueError, match="differ in layers or experts per token"):
        measure_step(logprobs, rollouts, version=2, train_routes={"s0": routes, "s1": other})


def test_keys_and_values_of_an_older_version_make_a_token_stale():
    rollouts = make_rollouts()
    rollouts[0].sequences[0].kv_versions[4:] = 1
    agreement = measure_step(trained(rollouts), rollouts, version=2)
    assert (agreement.num_tokens, agreement.num_stale) == (10, 2)


def test_missing_or_short_log_probs_are_refused_unless_nothing_was_sampled():
    rollouts = make_rollouts()
    logprobs = trained(rollouts)
    with pytest.raises(ValueError, match="no log-probs for sequence s2"):
        measure_step({k: v for k, v in logprobs.items() if k != "s2"}, rollouts, version=2)
    with pytest.raises(ValueError, match="sequence s1: 5 trainer log-probs for 6 tokens"):
        measure_step(logprobs | {"s1": logprobs["s1"][1:]}, rollouts, version=2)
    empty = make_rollouts(num=1, sampled=0)
    assert measure_step({}, empty, version=2).unjudged


def test_scores_of_both_sides_are_compared_with_argmax_and_routes_of_the_producing_position():
    sequences = [r.sequences[0] for r in make_rollouts(num=2)]

    def side(version, flip=None):
        result = {}
        for s in sequences:
            length = len(s.tokens)
            routes = np.tile(np.array([[[0, 1]]], dtype=np.int16), (length - 1, 1, 1))
            top1 = np.arange(length)
            if flip is not None:
                routes[flip] = [[0, 3]]
                top1[flip + 1] = 99
            values = np.where(s.loss_mask, s.logprobs, np.nan).astype(np.float32)
            result[s.sequence_id] = LogProbs(values, version, routes, top1)
        return result

    engine = side(2, flip=1)  # the forward at position 1 gives the log-prob of token 2, the first sampled one
    for s in sequences:
        engine[s.sequence_id].logprobs[2] += 1.0
    agreement = measure_scores(side(2), engine, sequences)
    assert agreement.metrics["route_agree"] == pytest.approx(6 / 8)
    assert agreement.metrics["argmax_agree"] == pytest.approx(6 / 8)
    assert agreement.buckets["routes"]["flipped"].abs_diff_mean == pytest.approx(1.0)
    assert agreement.buckets["routes"]["equal"].abs_diff_max == 0.0
    pooled = measure_scores(side(2), engine, [*sequences], ["r", "r"])
    assert pooled.metrics["abs_diff/rollout_mean"] == pytest.approx(pooled.metrics["abs_diff/mean"])
    assert measure_scores(side(3), side(2), sequences).unjudged  # an engine that was not refitted is stale
    with pytest.raises(ValueError, match="sequence s1 was not scored by the engine"):
        measure_scores(side(2), {"s0": engine["s0"]}, sequences)
    mixed = {"s0": side(2)["s0"], "s1": side(3)["s1"]}
    with pytest.raises(ValueError, match="several versions"):
        measure_scores(mixed, engine, sequences)
