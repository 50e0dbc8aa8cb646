"""Per-token losses and KL estimators against float64 loops, finite differences and exact enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.train import losses

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
ALL_AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"]


def random_case(seed: int, num: int = 40, spread: float = 0.5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    live = -rng.exponential(2.0, num)
    old = live + spread * rng.standard_normal(num)
    advantages = rng.standard_normal(num) * rng.integers(0, 2, num)
    return torch.tensor(live), torch.tensor(old), torch.tensor(advantages)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def naive_ppo(l: float, old: float, a: float, dual: float | None = None) -> float:  # noqa: E741
    r = math.exp(clip(l - old, -20, 20))
    loss = max(-a * r, -a * clip(r, 0.8, 1.28))
    return min(loss, -a * dual) if dual is not None and a < 0 else loss


@pytest.mark.parametrize("dual", [None, 3.0])
def test_ppo_clip_is_the_formula(dual):
    live, old, advantages = random_case(0, num=400, spread=1.5)
    result = losses.ppo_clip(live.float(), old.float(), advantages.float(), dual_clip=dual, **CLIP)
    expected = [naive_ppo(*t, dual) for t in zip(live.tolist(), old.tolist(), advantages.tolist(), strict=True)]
    np.testing.assert_allclose(result.loss.numpy(), expected, rtol=2e-5, atol=1e-6)
    r = np.exp((live - old).numpy())
    assert result.clipped_high.tolist() == ((r > 1.28) & (advantages.numpy() > 0)).tolist()
    assert result.clipped_low.tolist() == ((r < 0.8) & (advantages.numpy() < 0)).tolist()
    held = (r > 3.0) & (advantages.numpy() < 0) if dual else np.zeros(400, bool)
    assert result.dual_clipped.tolist() == held.tolist()
    assert dual is None or held.any()


@pytest.mark.parametrize("dual", [None, 3.0])
def test_ppo_clip_gradient_is_that_of_finite_differences(dual):
    live, old, advantages = random_case(1, num=60, spread=1.0)
    live.requires_grad_()
    losses.ppo_clip(live, old, advantages, dual_clip=dual, **CLIP).loss.sum().backward()
    h = 1e-6
    for t, (value, o, a) in enumerate(zip(live.tolist(), old.tolist(), advantages.tolist(), strict=True)):
        slope = (naive_ppo(value + h, o, a, dual) - naive_ppo(value - h, o, a, dual)) / (2 * h)
        assert live.grad is not None
        assert live.grad[t].item() == pytest.approx(slope, abs=1e-6, rel=1e-5)


def test_on_policy_the_gradient_of_ppo_clip_is_minus_the_advantage():
    live, _, advantages = random_case(2)
    live.requires_grad_()
    losses.ppo_clip(live, live.detach(), advantages, **CLIP).loss.sum().backward()
    torch.testing.assert_close(live.grad, -advantages)


def test_gspo_uses_the_mean_log_ratio_of_the_sequence_and_the_gradient_of_each_token():
    live, old, advantages = random_case(3, num=12, spread=0.3)
    index = torch.tensor([0] * 3 + [1] * 7 + [2] * 2)
    live.requires_grad_()
    result = losses.gspo(live, old, advantages, index, 3, **CLIP)
    result.loss.sum().backward()
    assert live.grad is not None
    for sequence in range(3):
        members = [t for t in range(12) if index[t] == sequence]
        k = sum(live[t].item() - old[t].item() for t in members) / len(members)
        s = math.exp(k)
        for t in members:
            a = advantages[t].item()
            unclipped, clipped = -a * s, -a * clip(s, 0.8, 1.28)
            assert result.loss[t].item() == pytest.approx(max(unclipped, clipped))
            slope = -a * s if 0.8 <= s <= 1.28 or unclipped > clipped else 0.0
            assert live.grad[t].item() == pytest.approx(slope)


def test_gspo_ratio_gets_less_noisy_with_length():
    """The mean log-ratio: a summed one would spread by sqrt(length) and leave 1 although the policies match (A9)."""
    rng = np.random.default_rng(4)
    spread = {}
    for length in (10, 1000):
        noise = torch.tensor(rng.normal(0, 0.05, (200, length))).flatten()
        index = torch.arange(200).repeat_interleave(length)
        zero = torch.zeros_like(noise)
        ratios = losses.gspo(noise, zero, zero, index, 200, **CLIP).ratio[::length]
        spread[length] = ratios.std().item()
        assert ratios.mean().item() == pytest.approx(1.0, abs=0.005)
    assert spread[1000] == pytest.approx(spread[10] / 10, rel=0.25)


def test_cispo_clips_the_weight_and_never_the_gradient():
    live, old, advantages = random_case(5, spread=1.0)
    live.requires_grad_()
    result = losses.cispo(live, old, advantages, **CLIP)
    result.loss.sum().backward()
    r = torch.exp(live.detach() - old).clamp(0.8, 1.28)
    torch.testing.assert_close(result.loss.detach(), -r * advantages * live.detach())
    torch.testing.assert_close(live.grad, -r * advantages)


def test_cispo_marks_each_weight_that_it_clips_whatever_the_advantage():
    raw = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 3.0])
    for advantage in (1.0, -1.0):
        result = losses.cispo(raw.log(), torch.zeros(7), torch.full((7,), advantage), **CLIP)
        torch.testing.assert_close(result.ratio, raw)
        assert result.clipped_low.tolist() == [True, True, False, False, False, False, False]
        assert result.clipped_high.tolist() == [False, False, False, False, False, True, True]


def test_reinforce_and_sft_are_weighted_log_likelihoods():
    live, old, advantages = random_case(6)
    live.requires_grad_()
    losses.reinforce(live, old, advantages).loss.sum().backward()
    torch.testing.assert_close(live.grad, -advantages)
    torch.testing.assert_close(losses.sft(live.detach()), -live.detach())


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("x", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_ratios_leave_loss_and_gradient_finite(name, x):
    live = torch.tensor([-1.0 + min(x, 0)], requires_grad=True)
    old = live.detach() - x
    advantages = torch.tensor([-1.0])
    result = {
        "ppo_clip": lambda: losses.ppo_clip(live, old, advantages, **CLIP),
        "gspo": lambda: losses.gspo(live, old, advantages, torch.tensor([0]), 1, **CLIP),
        "cispo": lambda: losses.cispo(live, old, advantages, **CLIP),
        "reinforce": lambda: losses.reinforce(live, old, advantages),
    }[name]()
    result.loss.sum().backward()
    assert live.grad is not None
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(live.grad).all()
    assert 0 < result.ratio.item() <= math.exp(20.001)


def test_a_nan_log_prob_stays_nan():
    """Nothing in the loss may turn NaN into a number: the gate must see it."""
    live = torch.tensor([float("nan"), -1.0])
    zero = torch.zeros(2)
    assert losses.ppo_clip(live, zero, torch.ones(2), **CLIP).loss.isnan().tolist() == [True, False]
    assert losses.kl("k3", live, zero, zero).value.isnan().tolist() == [True, False]


# --- KL ---------------------------------------------------------------------------------------------------------------


def naive_kl(name: str, live: float, old: float, ref: float) -> float:
    y = clip(ref - live, -20, 20)
    r = math.exp(clip(live - old, -20, 20))
    k2, k3 = clip(y * y / 2, -10, 10), clip(math.exp(y) - 1 - y, -10, 10)
    return {"k2": r * k2, "k3": k3, "kl_unbiased": r * k3}[name]


@pytest.mark.parametrize("name", ["k2", "k3", "kl_unbiased"])
def test_kl_values_are_the_formulas(name):
    live, old, _ = random_case(7, num=200)
    reference = live + 2.0 * torch.tensor(np.random.default_rng(8).standard_normal(200))
    result = losses.kl(name, live, old, reference)
    expected = [naive_kl(name, *t) for t in zip(live.tolist(), old.tolist(), reference.tolist(), strict=True)]
    np.testing.assert_allclose(result.value.numpy(), expected, rtol=1e-9, atol=1e-12)
    y = (reference - live).numpy()
    unbounded = y**2 / 2 if name == "k2" else np.exp(y) - 1 - y
    assert result.clamped.tolist() == (unbounded > 10).tolist()
    assert 0 < result.clamped.sum() < 200


@pytest.mark.parametrize("name", ["k2", "k3", "kl_unbiased"])
@pytest.mark.parametrize("y", [-1e4, -100.0, -25.0, 15.0, 25.0, 100.0, 1e4, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_clamped_token_has_a_finite_value_and_exactly_no_gradient(name, y, dtype):
    """k3 with the bound behind the exponential is finite forward and NaN backward (A10)."""
    live = torch.full((1,), -1.0, dtype=dtype, requires_grad=True)
    result = losses.kl(name, live, live.detach() + 0.1, live.detach() + y)
    result.value.float().sum().backward()
    assert live.grad is not None
    assert torch.isfinite(result.value).all()
    assert live.grad.item() == 0.0
    assert result.clamped.item()


@pytest.mark.parametrize(("name", "y"), [("k2", 4.0), ("k3", 2.0), ("k3", -10.0), ("kl_unbiased", 2.0)])
def test_below_the_bound_the_clamps_change_nothing(name, y):
    live = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    result = losses.kl(name, live, live.detach(), live.detach() + y)
    result.value.sum().backward()
    assert not result.clamped.item()
    k3 = math.exp(y) - 1 - y
    assert result.value.item() == pytest.approx(y * y / 2 if name == "k2" else k3)
    slope = {"k2": -y, "k3": 1 - math.exp(y), "kl_unbiased": k3 + 1 - math.exp(y)}[name]
    assert live.grad is not None
    assert live.grad.item() == pytest.approx(slope)


class Vocabulary:
    """Three categorical distributions over a small vocabulary: live, old (samples) and reference."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.logits = torch.tensor(0.6 * rng.standard_normal(6), requires_grad=True)
        self.old = torch.log_softmax(self.logits.detach() + 0.4 * torch.tensor(rng.standard_normal(6)), 0)
        self.reference = torch.log_softmax(0.5 * torch.tensor(rng.standard_normal(6)), 0)

    @property
    def live(self) -> torch.Tensor:
        return torch.log_softmax(self.logits, 0)

    def gradient(self, scalar: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(scalar, self.logits)[0]

    def reverse_kl(self) -> torch.Tensor:
        return (self.live.exp() * (self.live - self.reference)).sum()

    def forward_kl(self) -> torch.Tensor:
        return (self.reference.exp() * (self.reference - self.live)).sum()

    def expected(self, name, old: torch.Tensor) -> torch.Tensor:
        """The expectation of the per-token estimate over samples of ``old``, by enumeration."""
        return (old.exp() * losses.kl(name, self.live, old, self.reference).value).sum()


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_kl_estimators_by_exact_enumeration(seed):
    case = Vocabulary(seed)
    on_policy = case.live.detach()
    reverse, forward = case.gradient(case.reverse_kl()), case.gradient(case.forward_kl())
    assert not torch.allclose(reverse, forward, atol=1e-3)
    torch.testing.assert_close(case.gradient(case.expected("k2", on_policy)), reverse)
    torch.testing.assert_close(case.gradient(case.expected("k3", on_policy)), forward)
    torch.testing.assert_close(case.gradient(case.expected("kl_unbiased", on_policy)), reverse)
    # off-policy: samples come from another distribution than the live one
    torch.testing.assert_close(case.gradient(case.expected("k2", case.old)), reverse)
    torch.testing.assert_close(case.gradient(case.expected("kl_unbiased", case.old)), reverse)
    torch.testing.assert_close(case.expected("kl_unbiased", case.old), case.reverse_kl())
    assert not torch.allclose(case.gradient(case.expected("k3", case.old)), reverse, atol=1e-3)


def test_k1_in_the_loss_is_refused_because_its_expected_gradient_is_zero():
    case = Vocabulary(0)
    on_policy = case.live.detach()
    k1 = (on_policy.exp() * (case.live - case.reference)).sum()
    torch.testing.assert_close(case.gradient(k1), torch.zeros(6, dtype=torch.float64), atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="zero expected gradient"):
        losses.kl("k1", case.live, on_policy, case.reference)


@pytest.mark.parametrize("name", ["k2", "k3", "kl_unbiased"])
def test_a_step_on_the_kl_term_lowers_the_kl_to_the_reference(name):
    """The sign: a maximised KL moves the policy away (A15)."""
    case = Vocabulary(1)
    before = case.reverse_kl().item(), case.forward_kl().item()
    slope = case.gradient(case.expected(name, case.live.detach()))
    with torch.no_grad():
        case.logits -= 0.1 * slope
    assert case.reverse_kl().item() < before[0] - 1e-4
    assert case.forward_kl().item() < before[1] - 1e-4


# --- aggregation ------------------------------------------------------------------------------------------------------


def naive_aggregate(values, rollouts, kind, length_norm):
    pooled: dict[int, list[float]] = {}
    for value, rollout in zip(values, rollouts, strict=True):
        pooled.setdefault(rollout, []).append(value)
    num_tokens, num_rollouts = len(values), len(pooled)
    if kind == "token_mean":
        return sum(values) / num_tokens
    if kind == "seq_mean_token_mean":
        return sum(sum(v) / len(v) for v in pooled.values()) / num_rollouts
    return sum(values) / (num_rollouts * (length_norm if kind == "token_sum_norm" else 1))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=40),
    st.sampled_from(ALL_AGGREGATIONS),
)
def test_any_split_into_micro_batches_aggregates_to_the_same_loss(tokens, kind):
    """Tokens of (value, rollout, micro-batch): also micro-batches, and ranks, of very different sizes (A2, A3)."""
    rollouts = [r for _, r, _ in tokens]
    lengths = torch.tensor([rollouts.count(r) for r in rollouts])
    values = torch.tensor([v for v, _, _ in tokens], dtype=torch.float64)
    shared = {"num_tokens": len(tokens), "num_rollouts": len(set(rollouts)), "length_norm": 7}
    total = 0.0
    for part in range(3):
        chosen = torch.tensor([p == part for _, _, p in tokens])
        share = losses.aggregate(values[chosen], kind, tokens_per_rollout=lengths[chosen], **shared)
        total += share.item()
    assert total == pytest.approx(naive_aggregate(values.tolist(), rollouts, kind, 7), abs=1e-12)


@pytest.mark.parametrize("kind", ALL_AGGREGATIONS)
def test_nothing_to_aggregate_is_a_finite_zero_with_a_gradient(kind):
    empty = torch.zeros(0, requires_grad=True)
    loss = losses.aggregate(empty, kind, tokens_per_rollout=empty, num_tokens=0, num_rollouts=0, length_norm=5)
    loss.backward()
    assert loss.item() == 0.0


def test_wrong_denominators_are_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="claims 0 tokens"):
        losses.aggregate(one, "token_mean", tokens_per_rollout=one, num_tokens=0, num_rollouts=1)
    with pytest.raises(ValueError, match="length_norm"):
        losses.aggregate(one, "token_sum_norm", tokens_per_rollout=one, num_tokens=1, num_rollouts=1)
