"""Advantages against loops written independently, and the rules of the baseline."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.schema import (
    AlgorithmConfig,
    CorrectionConfig,
    KlConfig,
    OverlongConfig,
)
from lockstep.interfaces import LogProbs
from lockstep.records import Problem, Rollout, Score, Sequence
from lockstep.train.advantages import informative_groups, prepare, returns_to_go, whiten

PROMPT = 2
GROUP_ADVANTAGES = ["grpo", "dr_grpo", "rloo"]


def make_sequence(name: str, num: int, logprob: float = -1.0, tools: int = 0) -> Sequence:
    """A prompt of two tokens, ``num`` sampled ones, with ``tools`` tool tokens after the first of them."""
    mask = [False] * PROMPT + [True] * min(num, 1) + [False] * tools + [True] * max(num - 1, 0)
    where = np.array(mask, dtype=bool)
    return Sequence(
        name,
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=where,
        logprobs=np.where(where, logprob, 0.0).astype(np.float32),
        versions=np.where(where, 0, -1).astype(np.int32),
        kv_versions=np.where(where, 0, -1).astype(np.int32),
    )


def make_rollout(name, group, reward, lengths=(3,), status="finished", correct=None, tools=0) -> Rollout:
    return Rollout(
        rollout_id=name,
        group_id=group,
        problem=Problem(group, "p", None),
        sequences=tuple(make_sequence(f"{name}/{i}", n, tools=tools) for i, n in enumerate(lengths)),
        text="",
        score=Score(reward, correct=correct),
        status=status,
    )


def make_group(rewards, group="g", lengths=None, statuses=None) -> list[Rollout]:
    lengths = lengths or [3] * len(rewards)
    statuses = statuses or ["finished"] * len(rewards)
    return [
        make_rollout(f"{group}{i}", group, r, (n,), s)
        for i, (r, n, s) in enumerate(zip(rewards, lengths, statuses, strict=True))
    ]


def scalar_advantages(prepared) -> list[float]:
    """The advantage of each item, checked to be equal over its counted tokens and 0 elsewhere."""
    result = []
    for item in prepared.items:
        values = item.advantages[item.loss_mask]
        assert not item.advantages[~item.loss_mask].any()
        assert len(set(values.tolist())) <= 1
        result.append(float(values[0]) if len(values) else math.nan)
    return result


def naive_group(kind: str, rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    if kind == "dr_grpo":
        return [r - mean for r in rewards]
    if kind == "rloo":  # the mean of the others, literally
        return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    return [(r - mean) / (statistics.stdev(rewards) + 1e-6) for r in rewards]


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
def test_group_advantages_are_the_formulas(kind):
    rewards = {"a": [1.0, 0.0, 0.2, 1.2], "b": [0.0, 0.0, 0.0, 1.0]}
    rollouts = [r for pair in itertools.zip_longest(*(make_group(v, k) for k, v in rewards.items())) for r in pair]
    got = scalar_advantages(prepare(rollouts, AlgorithmConfig(group_size=4, advantage=kind)))
    expected = {k: naive_group(kind, v) for k, v in rewards.items()}
    assert got == pytest.approx([expected[g][i] for i in range(4) for g in ("a", "b")], rel=1e-6)


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
@pytest.mark.parametrize("rewards", [[1.0, 0.0], [0.25, 0.5, 1.0]])
def test_the_smallest_groups_have_the_formulas_advantages_too(kind, rewards):
    got = scalar_advantages(prepare(make_group(rewards), AlgorithmConfig(group_size=len(rewards), advantage=kind)))
    assert got == pytest.approx(naive_group(kind, rewards), rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.sampled_from(GROUP_ADVANTAGES))
def test_group_advantages_sum_to_zero(rewards, kind):
    got = scalar_advantages(prepare(make_group(rewards), AlgorithmConfig(group_size=len(rewards), advantage=kind)))
    assert sum(got) == pytest.approx(0.0, abs=1e-4)
    assert all(math.isfinite(a) for a in got)


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.7, 1e-30])
def test_equal_rewards_give_exactly_zero(kind, reward):
    """The mean of seven 0.1 is not 0.1; divided by 1e-6 that would be an advantage (A4)."""
    prepared = prepare(make_group([reward] * 7), AlgorithmConfig(group_size=7, advantage=kind))
    assert scalar_advantages(prepared) == [0.0] * 7
    assert prepared.metrics["uniform_groups"] == 1
    assert prepared.metrics["degenerate_groups"] == 0


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
@pytest.mark.parametrize("leaves", ["aborted", "failed", "abstained", "empty"])
def test_excluded_samples_leave_the_baseline_and_are_not_trained_on(kind, leaves):
    """Abstained (A6) and empty ones (A5: its reward of 10 must not shift its peers) among them."""
    rollouts = make_group([1.0, 0.0, 0.5])
    rollouts.append(
        make_rollout(
            "x",
            "g",
            None if leaves == "abstained" else 10.0,
            (0,) if leaves == "empty" else (3,),
            leaves if leaves in ("aborted", "failed") else "finished",
        )
    )
    prepared = prepare(rollouts, AlgorithmConfig(group_size=4, advantage=kind))
    assert scalar_advantages(prepared)[:3] == pytest.approx(naive_group(kind, [1.0, 0.0, 0.5]), rel=1e-6)
    last = prepared.items[-1]
    assert not last.loss_mask.any()
    assert not last.advantages.any()
    assert last.sequence.loss_mask.any() == (leaves != "empty")  # the agreement measure still sees its tokens
    assert prepared.metrics["num_excluded"] == 1
    assert prepared.metrics[f"num_{'aborted' if leaves == 'failed' else leaves}"] == 1


@pytest.mark.parametrize("kind", [*GROUP_ADVANTAGES, "reinforce_pp_baseline"])
def test_a_lone_survivor_has_no_advantage_and_its_group_is_counted(kind):
    rollouts = make_group([1.0, 0.0, 0.0], "a", statuses=["finished", "aborted", "failed"]) + make_group(
        [1.0, 0.0, 0.0], "b"
    )
    prepared = prepare(rollouts, AlgorithmConfig(group_size=3, advantage=kind))
    assert scalar_advantages(prepared)[0] == 0.0
    assert prepared.metrics["degenerate_groups"] == 1


def test_samples_of_a_prompt_must_share_one_group_id():
    """A fresh id per sample makes groups of one, and the baseline disappears (A12)."""
    rollouts = [make_rollout(f"r{i}", f"unique{i}", float(i)) for i in range(8)]
    with pytest.raises(ValueError, match=r"'unique0' has 1 rollouts, but algorithm\.group_size is 8"):
        prepare(rollouts, AlgorithmConfig(group_size=8))
    with pytest.raises(ValueError, match="has 4 rollouts"):
        prepare(make_group([0.0, 1.0]) + make_group([0.0, 1.0]), AlgorithmConfig(group_size=2))


def test_sequence_ids_must_be_unique():
    twice = [make_rollout("r", "g", 1.0), make_rollout("r", "g", 0.0)]
    with pytest.raises(ValueError, match="occurs more than once"):
        prepare(twice, AlgorithmConfig(group_size=2))


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="rollout g1: reward"):
        prepare(make_group([0.0, reward]), AlgorithmConfig(group_size=2))


# --- truncation and overlong shaping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "mask", "penalise"])
def test_truncation_policies(policy):
    """A masked truncated sample stays in the baseline, and its tokens leave every count (A1)."""
    rollouts = make_group([1.0, 0.0, 0.5], lengths=[10, 15, 5], statuses=["finished", "finished", "truncated"])
    config = AlgorithmConfig(group_size=3, advantage="dr_grpo", truncated=policy, truncated_penalty=0.25)
    prepared = prepare(rollouts, config)
    rewards = [1.0, 0.0, 0.25 if policy == "penalise" else 0.5]
    got, expected = scalar_advantages(prepared), naive_group("dr_grpo", rewards)
    assert got[:2] == pytest.approx(expected[:2])
    assert math.isnan(got[2]) if policy == "mask" else got[2] == pytest.approx(expected[2])
    assert prepared.metrics["num_loss_tokens"] == (25 if policy == "mask" else 30)
    assert prepared.metrics["num_truncated"] == 1
    assert prepared.metrics["num_excluded"] == 0
    assert prepared.metrics["reward/mean"] == pytest.approx(0.5)


def test_a_truncated_rollout_of_several_sequences_is_flagged_once():
    """PrimeIntellect-ai/prime-rl#855: with an entry per response the flags were more than the batch."""
    turns = [make_rollout("a", "g", 1.0, (3, 4, 2), "truncated"), make_rollout("b", "g", 0.0, (5,), "truncated")]
    prepared = prepare([*turns, make_rollout("c", "g", 0.5, (2, 2))], AlgorithmConfig(group_size=3, truncated="mask"))
    assert prepared.metrics["num_truncated"] == 2
    assert [bool(item.loss_mask.any()) for item in prepared.items] == [False, False, False, False, True, True]


def test_overlong_shaping_enters_value_and_baseline_alike():
    """Three correct answers, short to long, and a wrong one: the group's advantages sum to 0 (A13)."""
    rollouts = make_group([1.0, 1.0, 1.0, 0.0], lengths=[4, 14, 18, 20])
    config = AlgorithmConfig(group_size=4, advantage="dr_grpo", overlong=OverlongConfig(factor=0.5, buffer_tokens=8))
    prepared = prepare(rollouts, config, max_new_tokens=20)
    shaped = [1.0, 1.0 - 0.5 * 2 / 8, 1.0 - 0.5 * 6 / 8, 0.0 - 0.5 * 8 / 8]
    got = scalar_advantages(prepared)
    assert got == pytest.approx(naive_group("dr_grpo", shaped), rel=1e-6)
    assert sum(got) == pytest.approx(0.0, abs=1e-6)
    assert prepared.metrics["num_overlong"] == 3
    assert prepared.metrics["reward/mean"] == pytest.approx(0.75)
    assert prepared.metrics["shaped_reward/mean"] == pytest.approx(sum(shaped) / 4)
    with pytest.raises(ValueError, match="max_new_tokens"):
        prepare(rollouts, config)


def test_dynamic_sampling_looks_at_the_raw_task_metric():
    """An all-wrong group is dropped whatever its lengths and shaping are (A14)."""
    wrong = make_group([0.0, 0.0, 0.0], "wrong", lengths=[3, 12, 20])
    mixed = make_group([0.0, 1.0, 0.0], "mixed")
    bonus = [make_rollout(f"b{i}", "bonus", r, correct=True) for i, r in enumerate([1.0, 1.2, 1.0])]
    partly = [make_rollout(f"p{i}", "partly", r, correct=c) for i, (r, c) in enumerate([(1.0, True), (1.0, None)])]
    alone = make_group([0.0, 1.0, 1.0], "alone", statuses=["finished", "aborted", "failed"])
    assert informative_groups([*mixed, *wrong, *bonus, *partly, *alone]) == ("mixed",)
    flipped = [make_rollout(f"f{i}", "flipped", 0.5, correct=c) for i, c in enumerate([True, False])]
    assert informative_groups([*flipped, *mixed]) == ("flipped", "mixed")


# --- per-token advantages ---------------------------------------------------------------------------------------------


def test_reinforce_pp_is_the_whitened_return_to_go():
    rollouts = make_group([1.0, -0.5], lengths=[3, 2])
    config = AlgorithmConfig(group_size=2, advantage="reinforce_pp", gamma=0.9)
    returns = [[0.81, 0.9, 1.0], [-0.45, -0.5]]
    flat = [r for row in returns for r in row]
    mean, std = statistics.fmean(flat), statistics.stdev(flat)
    for item, row in zip(prepare(rollouts, config).items, returns, strict=True):
        np.testing.assert_allclose(item.advantages[item.loss_mask], [(r - mean) / std for r in row], rtol=1e-5)


def test_return_to_go_counts_sampled_tokens_only():
    """Tool tokens neither discount nor carry an advantage (A18); several sequences are one trajectory in order."""
    plain = make_rollout("a", "g", 1.0, (5,))
    with_tools = make_rollout("b", "g", 1.0, (3, 2), tools=4)
    config = AlgorithmConfig(group_size=2, advantage="reinforce_pp", gamma=0.5)
    first, second, third = prepare([plain, with_tools], config).items
    ours = np.concatenate([second.advantages[second.loss_mask], third.advantages[third.loss_mask]])
    np.testing.assert_array_equal(first.advantages[first.loss_mask], ours)
    assert len(set(ours.tolist())) == 5
    assert not second.advantages[~second.loss_mask].any()


def test_reinforce_pp_baseline_is_whitened_over_tokens_not_samples():
    rollouts = make_group([1.0, 0.0], lengths=[6, 2])
    config = AlgorithmConfig(group_size=2, advantage="reinforce_pp_baseline")
    tokens = [0.5] * 6 + [-0.5] * 2
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    got = scalar_advantages(prepare(rollouts, config))
    assert got == pytest.approx([(0.5 - mean) / std, (-0.5 - mean) / std], rel=1e-5)


@pytest.mark.parametrize("values", [[], [3.0]])
def test_fewer_than_two_values_are_not_whitened(values):
    """The unbiased variance of one value does not exist (A7)."""
    assert whiten(np.array(values)).tolist() == values


def test_a_batch_of_one_token_keeps_its_advantage_and_says_so():
    rollouts = make_group([1.0, 0.0], lengths=[1, 1], statuses=["finished", "aborted"])
    prepared = prepare(rollouts, AlgorithmConfig(group_size=2, advantage="reinforce_pp"))
    assert prepared.items[0].advantages.sum() == 1.0
    assert prepared.metrics["not_whitened"] == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=10), st.floats(0.1, 1.0))
def test_returns_to_go_are_discounted_sums(rewards, gamma):
    got = returns_to_go(np.array(rewards), gamma)
    for t in range(len(rewards)):
        assert got[t] == pytest.approx(sum(gamma ** (u - t) * r for u, r in enumerate(rewards) if u >= t), abs=1e-9)


# --- KL in the reward, distillation, anchors --------------------------------------------------------------------------


def scores(rollouts, value) -> dict[str, LogProbs]:
    """Log-probs of every sequence: ``value`` at sampled tokens, NaN elsewhere (where they must not be read)."""
    return {
        s.sequence_id: LogProbs(np.where(s.loss_mask, value, np.nan).astype(np.float32), version=0)
        for r in rollouts
        for s in r.sequences
    }


def test_kl_in_the_reward_is_k1_summed_over_the_rollout():
    rollouts = make_group([1.0, 0.0], lengths=[4, 2])
    kl = KlConfig(place="reward", estimator="k1", coefficient=0.1)
    config = AlgorithmConfig(group_size=2, advantage="dr_grpo", kl=kl)
    prepared = prepare(rollouts, config, live=scores(rollouts, -1.0), reference=scores(rollouts, -1.5))
    shaped = [1.0 - 0.1 * 4 * 0.5, 0.0 - 0.1 * 2 * 0.5]  # l_v − l_ref = 0.5: above the reference is punished
    assert scalar_advantages(prepared) == pytest.approx(naive_group("dr_grpo", shaped), rel=1e-6)
    assert prepared.metrics["reward_kl/mean"] == pytest.approx(0.5)
    assert all(item.ref_logprobs is None for item in prepared.items)


def test_kl_in_the_reward_is_per_token_for_reinforce_pp_and_bounded():
    """Returns of five different values: whitening makes any two-valued ones equal, with the KL or without it."""
    rollouts = make_group([1.0, 0.5], lengths=[3, 2])
    kl = KlConfig(place="reward", estimator="k1", coefficient=0.01)
    config = AlgorithmConfig(group_size=2, advantage="reinforce_pp", gamma=0.5, kl=kl)
    reference = scores(rollouts[:1], -1000.0) | scores(rollouts[1:], -1.5)
    prepared = prepare(rollouts, config, live=scores(rollouts, -1.0), reference=reference)
    far, near = 0.01 * 20, 0.01 * 0.5  # l_v − l_ref = 999 is bounded, 0.5 is not
    third, fifth = 1.0 - far, 0.5 - near
    second, fourth = -far + 0.5 * third, -near + 0.5 * fifth
    returns = [-far + 0.5 * second, second, third, fourth, fifth]
    mean, std = statistics.fmean(returns), statistics.stdev(returns)
    got = np.concatenate([i.advantages[i.loss_mask] for i in prepared.items])
    np.testing.assert_allclose(got, [(r - mean) / std for r in returns], rtol=1e-5)


@pytest.mark.parametrize("bypass", [False, True])
def test_distill_is_the_teacher_minus_the_anchor_and_needs_no_reward(bypass):
    rollouts = make_group([None, None, None], statuses=["finished", "truncated", "aborted"])
    config = AlgorithmConfig(group_size=3, advantage="distill", corrections=CorrectionConfig(bypass=bypass))
    teacher, live = scores(rollouts, -0.5), scores(rollouts, -2.0)
    got = scalar_advantages(prepare(rollouts, config, teacher=teacher, live=live))
    assert got[:2] == pytest.approx([0.5, 0.5] if bypass else [1.5, 1.5])
    assert math.isnan(got[2])
    if not bypass:
        with pytest.raises(ValueError, match="need live log-probs"):
            prepare(rollouts, config, teacher=teacher)


def test_the_distance_to_the_teacher_is_the_mean_over_tokens_that_count():
    """4 tokens at 1 nat and 1 at 3, of which a masked sample's are none; not the mean of the rollouts' means."""
    rollouts = make_group([None] * 3, lengths=[4, 1, 9], statuses=["finished", "finished", "aborted"])
    teacher = scores(rollouts[:1], -2.0) | scores(rollouts[1:], -4.0)
    config = AlgorithmConfig(group_size=3, advantage="distill")
    metrics = prepare(rollouts, config, teacher=teacher, live=scores(rollouts, -1.0)).metrics
    assert metrics["teacher_kl/mean"] == pytest.approx((4 * 1.0 + 1 * 3.0) / 5)
    nothing = make_group([None] * 3, statuses=["aborted"] * 3)
    assert "teacher_kl/mean" not in prepare(nothing, config, teacher={}, live={}).metrics


def test_what_is_masked_whole_needs_neither_anchor_nor_reference():
    rollouts = make_group([1.0, 0.0, 0.5], statuses=["finished", "finished", "aborted"])
    config = AlgorithmConfig(group_size=3, kl=KlConfig(place="loss", coefficient=0.1))
    seen = rollouts[:2]
    items = prepare(rollouts, config, live=scores(seen, -2.0), reference=scores(seen, -3.0)).items
    assert [i.old_logprobs is None for i in items] == [i.ref_logprobs is None for i in items] == [False, False, True]


def test_anchor_and_reference_reach_the_items():
    rollouts = make_group([1.0, 0.0])
    live, reference = scores(rollouts, -2.0), scores(rollouts, -3.0)
    on_policy = prepare(rollouts, AlgorithmConfig(group_size=2), reference=reference)
    assert all(i.old_logprobs is None and i.ref_logprobs is None for i in on_policy.items)
    config = AlgorithmConfig(group_size=2, kl=KlConfig(place="loss", coefficient=0.1))
    for item in prepare(rollouts, config, live=live, reference=reference).items:
        assert item.old_logprobs is not None
        assert item.ref_logprobs is not None
        assert set(item.old_logprobs[item.loss_mask]) == {np.float32(-2.0)}
        assert set(item.ref_logprobs[item.loss_mask]) == {np.float32(-3.0)}
    bypass = AlgorithmConfig(group_size=2, corrections=CorrectionConfig(bypass=True))
    for item in prepare(rollouts, bypass, live=live).items:
        assert item.old_logprobs is item.sequence.logprobs


def test_missing_short_or_non_finite_log_probs_are_refused():
    rollouts = make_group([1.0, 0.0])
    config = AlgorithmConfig(group_size=2, kl=KlConfig(place="reward", estimator="k1", coefficient=0.1))
    live, reference = scores(rollouts, -1.0), scores(rollouts, -1.0)
    with pytest.raises(ValueError, match="need reference log-probs"):
        prepare(rollouts, config, live=live)
    with pytest.raises(ValueError, match="no live log-probs for sequence g0/0"):
        prepare(rollouts, config, live={}, reference=reference)
    short = {k: LogProbs(v.logprobs[:-1], 0) for k, v in live.items()}
    with pytest.raises(ValueError, match="4 live log-probs for 5 tokens"):
        prepare(rollouts, config, live=short, reference=reference)
    with pytest.raises(ValueError, match="reference log-prob of sequence g0/0 at position 2 is nan"):
        prepare(rollouts, config, live=live, reference=scores(rollouts, math.nan))
    both = AlgorithmConfig(group_size=2, advantage="distill", kl=config.kl)
    with pytest.raises(ValueError, match="distill takes no reward"):
        prepare(rollouts, both, teacher=live, live=live, reference=reference)
