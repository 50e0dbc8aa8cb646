"""The objective against an independent float64 loop, and its independence of how a batch is split."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.schema import AlgorithmConfig, CorrectionConfig, KlConfig
from lockstep.interfaces import LossTokens
from lockstep.records import Sequence, TrainSequence
from lockstep.train.objective import PolicyObjective, SupervisedObjective, means


@dataclass
class Row:
    """One training sequence of a test batch, all values [T]."""

    rollout_id: str
    mask: np.ndarray
    live: np.ndarray
    old: np.ndarray
    rollout: np.ndarray
    reference: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray


def make_rows(rng: np.random.Generator, rollouts: list[int], tools: float = 0.3) -> list[Row]:
    """A sequence for each entry of ``rollouts`` (equal entries: several sequences of one rollout)."""
    rows = []
    for rollout in rollouts:
        length = int(rng.integers(1, 9))
        live = -rng.exponential(1.5, length)
        rows.append(
            Row(
                rollout_id=f"r{rollout}",
                mask=rng.random(length) > tools,
                live=live,
                old=live + 0.3 * rng.standard_normal(length),
                rollout=live + 0.4 * rng.standard_normal(length),
                reference=live + 0.8 * rng.standard_normal(length),
                advantages=np.full(length, rng.standard_normal()),
                weights=rng.uniform(0.5, 1.5, length),
            )
        )
    return rows


def counts(rows: list[Row]) -> tuple[int, int, dict[str, int]]:
    """N, B and len_i of the whole batch."""
    per_rollout: dict[str, int] = {}
    for row in rows:
        per_rollout[row.rollout_id] = per_rollout.get(row.rollout_id, 0) + int(row.mask.sum())
    per_rollout = {k: v for k, v in per_rollout.items() if v}
    return sum(per_rollout.values()), len(per_rollout), per_rollout


def run(objective, rows: list[Row], parts: list[list[int]], overrides=(None, None)):
    """(loss, gradient by row and token, sums) of the batch in the given micro-batches, as a trainer would."""
    num_tokens, num_rollouts, per_rollout = counts(rows)
    num_tokens, num_rollouts = overrides[0] or num_tokens, overrides[1] or num_rollouts
    leaves = [torch.tensor(row.live, requires_grad=True) for row in rows]
    total, sums = 0.0, {}
    for part in parts:
        chosen = [i for i in part if rows[i].mask.any()]

        def flat(name, chosen=chosen):
            arrays = [getattr(rows[i], name)[rows[i].mask] for i in chosen]
            return torch.tensor(np.concatenate(arrays) if arrays else np.zeros(0))

        live = [leaves[i][torch.tensor(rows[i].mask)] for i in chosen]
        index = [np.full(int(rows[i].mask.sum()), n) for n, i in enumerate(chosen)]
        lengths = [np.full(int(rows[i].mask.sum()), float(per_rollout[rows[i].rollout_id])) for i in chosen]
        output = objective(
            LossTokens(
                logprobs=torch.cat(live) if live else torch.zeros(0, dtype=torch.float64, requires_grad=True),
                old=flat("old"),
                rollout=flat("rollout"),
                advantages=flat("advantages"),
                weights=flat("weights"),
                reference=flat("reference"),
                sequence_index=torch.tensor(np.concatenate(index) if index else np.zeros(0, dtype=np.int64)),
                num_sequences=len(chosen),
                tokens_per_rollout=torch.tensor(np.concatenate(lengths) if lengths else np.zeros(0)),
                num_tokens=num_tokens,
                num_rollouts=num_rollouts,
            )
        )
        output.loss.backward()
        total += output.loss.item()
        for name, value in output.sums.items():
            assert not value.requires_grad
            sums[name] = sums.get(name, 0.0) + value.item()
    return (
        total,
        [np.zeros(len(r.live)) if x.grad is None else x.grad.numpy() for x, r in zip(leaves, rows, strict=True)],
        sums,
    )


def naive_loss(config: AlgorithmConfig, rows: list[Row]) -> float:
    """The whole batch's loss, term by term."""
    num_tokens, num_rollouts, per_rollout = counts(rows)
    total = 0.0
    for row in rows:
        positions = [t for t in range(len(row.mask)) if row.mask[t]]
        for t in positions:
            x, a = row.live[t] - row.old[t], row.advantages[t]
            if config.loss == "gspo":
                x = sum(row.live[u] - row.old[u] for u in positions) / len(positions)
            r = math.exp(x)
            clipped = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
            if config.loss in ("ppo_clip", "gspo"):
                value = max(-a * r, -a * clipped)
            else:
                value = -a * row.live[t] * (clipped if config.loss == "cispo" else 1.0)
            w = row.weights[t]
            if config.corrections.weight == "tis":
                c = config.corrections
                w *= min(max(math.exp(row.old[t] - row.rollout[t]), c.weight_low), c.weight_high)
            value *= w
            if config.kl.place == "loss":
                y = row.reference[t] - row.live[t]
                k3 = min(math.exp(y) - 1 - y, 10.0)
                ratio = math.exp(row.live[t] - row.old[t])
                k = {"k2": ratio * min(y * y / 2, 10.0), "k3": k3, "kl_unbiased": ratio * k3}[config.kl.estimator]
                value += config.kl.coefficient * k
            share = {
                "token_mean": 1 / num_tokens,
                "seq_mean_token_mean": 1 / (per_rollout[row.rollout_id] * num_rollouts),
                "seq_mean_token_sum": 1 / num_rollouts,
                "token_sum_norm": 1 / (num_rollouts * (config.length_norm or 1)),
            }[config.aggregation]
            total += share * value
    return total


CONFIGS = [
    AlgorithmConfig(),
    AlgorithmConfig(dual_clip=3.0, clip_high=0.28, aggregation="token_sum_norm", length_norm=16),
    AlgorithmConfig(loss="gspo", aggregation="seq_mean_token_mean", kl=KlConfig(place="loss", coefficient=0.1)),
    AlgorithmConfig(loss="cispo", aggregation="seq_mean_token_sum", corrections=CorrectionConfig(weight="tis")),
    AlgorithmConfig(
        loss="reinforce",
        aggregation="seq_mean_token_mean",
        kl=KlConfig(place="loss", estimator="kl_unbiased", coefficient=0.3),
    ),
    AlgorithmConfig(
        aggregation="seq_mean_token_mean",
        corrections=CorrectionConfig(weight="tis", weight_low=0.8, weight_high=1.2),
        kl=KlConfig(place="loss", estimator="k2", coefficient=0.05),
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_loss_is_the_sum_of_its_terms(config):
    rows = make_rows(np.random.default_rng(0), [0, 1, 1, 2, 3, 3, 3])
    loss, _, _ = run(PolicyObjective(config), rows, [list(range(7))])
    assert loss == pytest.approx(naive_loss(config, rows), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=9),
    st.sampled_from(CONFIGS),
)
def test_any_split_into_micro_batches_gives_the_same_loss_gradient_and_sums(seed, layout, config):
    """Sequences of (rollout, micro-batch); a rollout's sequences may lie in different micro-batches."""
    rows = make_rows(np.random.default_rng(seed), [r for r, _ in layout], tools=0.5)
    objective = PolicyObjective(config)
    whole = run(objective, rows, [list(range(len(rows)))])
    parts = [[i for i, (_, p) in enumerate(layout) if p == part] for part in range(4)]
    split = run(objective, rows, parts)
    assert split[0] == pytest.approx(whole[0], abs=1e-12)
    for a, b in zip(split[1], whole[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    assert split[2] == pytest.approx(whole[2], abs=1e-12)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[4]])
def test_gradients_are_those_of_finite_differences(config):
    """Of the losses without stopped gradients; the others have exact slopes in test_losses."""
    rows = make_rows(np.random.default_rng(1), [0, 1, 1])
    _, gradients, _ = run(PolicyObjective(config), rows, [[0, 1, 2]])
    h = 1e-6
    for i, row in enumerate(rows):
        for t in range(len(row.live)):
            ends = []
            for sign in (1, -1):
                moved = row.live.copy()
                moved[t] += sign * h
                ends.append(naive_loss(config, [replace(r, live=moved) if j == i else r for j, r in enumerate(rows)]))
            assert gradients[i][t] == pytest.approx((ends[0] - ends[1]) / (2 * h), abs=1e-7)


def test_masked_positions_change_neither_loss_nor_gradient():
    """Whatever stands in a padded or tool position (A8)."""
    rows = make_rows(np.random.default_rng(2), [0, 0, 1], tools=0.5)
    noisy = [
        replace(r, **{n: np.where(r.mask, getattr(r, n), 1e9) for n in ("advantages", "old", "rollout", "weights")})
        for r in rows
    ]
    for config in CONFIGS:
        loss, gradients, _ = run(PolicyObjective(config), rows, [[0, 1, 2]])
        other, other_gradients, _ = run(PolicyObjective(config), noisy, [[0, 1, 2]])
        assert loss == other
        for row, a, b in zip(rows, gradients, other_gradients, strict=True):
            np.testing.assert_array_equal(a, b)
            assert not a[~row.mask].any()


def plain_row(rollout: str, mask: list[bool], advantage: float = 1.0) -> Row:
    num = len(mask)
    one, flat = np.ones(num), np.full(num, -1.0)
    return Row(rollout, np.array(mask), flat, flat.copy(), flat.copy(), flat.copy(), advantage * one, one.copy())


def test_token_mean_divides_by_the_tokens_that_count():
    """10 model tokens among 90 tool tokens (A18); 25 of 30 tokens left by masking (A1); on policy loss = −A."""
    tools = plain_row("a", [True] * 10 + [False] * 90)
    loss, gradients, _ = run(PolicyObjective(AlgorithmConfig()), [tools], [[0]])
    assert loss == pytest.approx(-1.0)
    assert gradients[0].tolist() == pytest.approx([-0.1] * 10 + [0.0] * 90)
    masked = [plain_row("a", [True] * 10), plain_row("b", [True] * 15), plain_row("c", [False] * 5)]
    assert run(PolicyObjective(AlgorithmConfig()), masked, [[0], [1], [2]])[0] == pytest.approx(-1.0)


def test_an_all_masked_batch_is_a_finite_zero_without_metrics():
    loss, gradients, sums = run(PolicyObjective(CONFIGS[-1]), [plain_row("a", [False] * 4)], [[0]])
    assert loss == 0.0
    assert not gradients[0].any()
    assert means(sums, 0) == {}


def test_ranks_of_very_different_sizes_equal_one_rank():
    """100 and 1 tokens: each share is over the global count, so the sum is the single-rank loss (A2, A3)."""
    rows = [plain_row("a", [True] * 100, 0.01), plain_row("b", [True], 1.0)]
    loss, gradients, _ = run(PolicyObjective(AlgorithmConfig()), rows, [[0], [1]])
    assert loss == pytest.approx(-(100 * 0.01 + 1.0) / 101)
    assert gradients[1].tolist() == pytest.approx([-1 / 101])


def test_rejection_shrinks_the_divisor_and_a_fixed_denominator_keeps_it():
    """5 tokens of which 3 are rejected (A11)."""
    rejected = [plain_row("a", [True, True, False, False, False])]
    assert run(PolicyObjective(AlgorithmConfig()), rejected, [[0]])[0] == pytest.approx(-1.0)
    assert run(PolicyObjective(AlgorithmConfig()), rejected, [[0]], (5, 1))[0] == pytest.approx(-0.4)


def test_policy_and_kl_terms_share_one_reduction():
    """Lengths 10 and 100: the share of each term in the loss does not depend on the aggregation (A16)."""
    rows = [plain_row("a", [True] * 10), plain_row("b", [True] * 100)]
    rows = [replace(r, reference=r.reference + 0.5) for r in rows]
    k3 = math.exp(0.5) - 1.5
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        config = AlgorithmConfig(aggregation=aggregation, kl=KlConfig(place="loss", coefficient=2.0))
        loss, _, sums = run(PolicyObjective(config), rows, [[0, 1]])
        assert loss == pytest.approx(-1.0 + 2.0 * k3)
        assert means(sums, 110)["kl"] == pytest.approx(k3)


def test_ratio_is_reported_raw_and_the_clipped_share_apart():
    """Raw ratios 0.6, 12.2, 0.8: a mean after the cap looks healthy (A17)."""
    raw = np.array([0.6, 12.2, 0.8])
    row = plain_row("a", [True] * 3)
    row = replace(row, old=row.live - np.log(raw))
    _, _, sums = run(PolicyObjective(AlgorithmConfig()), [row], [[0]])
    metrics = means(sums, 3)
    assert metrics["ratio"] == pytest.approx(raw.mean())
    assert metrics["clip_high"] == pytest.approx(1 / 3)
    assert metrics["clip_low"] == 0.0  # a positive advantage is not clipped from below
    tis = AlgorithmConfig(corrections=CorrectionConfig(weight="tis"))
    on_policy = replace(row, old=row.live, rollout=row.live - np.log(raw))
    _, gradients, sums = run(PolicyObjective(tis), [on_policy], [[0]])
    metrics = means(sums, 3)
    assert metrics["tis_ratio"] == pytest.approx(raw.mean())
    assert metrics["tis_clipped"] == pytest.approx(1 / 3)
    assert metrics["ratio"] == pytest.approx(1.0)
    assert gradients[0].tolist() == pytest.approx([-0.2, -2.0 / 3, -0.8 / 3])  # weights scale, and carry no gradient


def test_clamped_kl_tokens_are_counted():
    row = plain_row("a", [True] * 4)
    row = replace(row, reference=row.live + np.array([0.0, 100.0, -100.0, 1.0]))
    config = AlgorithmConfig(kl=KlConfig(place="loss", coefficient=1.0))
    loss, gradients, sums = run(PolicyObjective(config), [row], [[0]])
    assert sums["kl_clamped"] == 2
    assert math.isfinite(loss)
    assert np.isfinite(gradients[0]).all()


def item(mask: list[bool], advantages: list[float]) -> TrainSequence:
    where, ints = np.array(mask), np.zeros(len(mask), dtype=np.int32)
    sequence = Sequence("s", ints, where, np.zeros(len(mask), dtype=np.float32), ints, ints)
    return TrainSequence(sequence, "r", where, np.array(advantages, dtype=np.float32))


def test_needs_gradient_only_where_the_gradient_can_differ_from_zero():
    policy = PolicyObjective(AlgorithmConfig())
    with_kl = PolicyObjective(AlgorithmConfig(kl=KlConfig(place="loss", coefficient=0.1)))
    in_reward = PolicyObjective(AlgorithmConfig(kl=KlConfig(place="reward", estimator="k1", coefficient=0.1)))
    zero, one_token, outside = (
        item([False, True, True], [0, 0, 0]),
        item([False, True], [0, -1]),
        item([False, True], [1, 0]),
    )
    nothing = item([False, False], [1, 1])
    assert [policy.needs_gradient(i) for i in (zero, one_token, outside, nothing)] == [False, True, False, False]
    assert [with_kl.needs_gradient(i) for i in (zero, one_token, outside, nothing)] == [True, True, True, False]
    assert not in_reward.needs_gradient(zero)
    assert policy.needs_gradient(item([False, True], [0, math.nan]))
    assert SupervisedObjective().needs_gradient(zero)
    assert not SupervisedObjective().needs_gradient(nothing)


def test_zero_advantages_give_an_exactly_zero_gradient():
    """What ``needs_gradient`` promises, for each loss."""
    rows = [replace(r, advantages=np.zeros(len(r.live))) for r in make_rows(np.random.default_rng(3), [0, 1])]
    for loss, aggregation in (("ppo_clip", "token_mean"), ("gspo", "seq_mean_token_mean"), ("cispo", "token_mean")):
        config = AlgorithmConfig(loss=loss, aggregation=aggregation)
        _, gradients, _ = run(PolicyObjective(config), rows, [[0, 1]])
        assert not any(g.any() for g in gradients)


def test_supervised_objective_is_the_mean_negative_log_likelihood():
    rows = make_rows(np.random.default_rng(4), [0, 1, 2])
    values = np.concatenate([-r.live[r.mask] for r in rows])
    loss, _, sums = run(SupervisedObjective(), rows, [[0], [1, 2]])
    assert loss == pytest.approx(values.mean())
    assert means(sums, len(values))["nll"] == pytest.approx(values.mean())


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"kl": KlConfig(place="loss", estimator="k1", coefficient=0.1)}, "k1"),
        ({"loss": "gspo"}, "seq_mean_token_mean"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"aggregation": "token_sum_norm"}, "length_norm"),
        ({"corrections": CorrectionConfig(bypass=True, weight="tis")}, "bypass"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        PolicyObjective(AlgorithmConfig(**settings_))


def test_kl_without_a_reference_is_refused():
    one = torch.ones(1)
    tokens = LossTokens(-one, -one, -one, one, one, None, torch.zeros(1, dtype=torch.long), 1, one, 1, 1)
    with pytest.raises(ValueError, match="reference"):
        PolicyObjective(AlgorithmConfig(kl=KlConfig(place="loss", coefficient=0.1)))(tokens)
