"""Every agreement metric against float64 loops; layouts, staleness, non-finite values and planted faults."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.agreement import measure, self_difference

F32 = np.float32


def make_case(seed: int, lengths=(5, 1, 8, 3), noise: float = 0.1):
    """Rows of log-probs of both sides and a mask, as lists of float32 arrays."""
    rng = np.random.default_rng(seed)
    rollout = [(-rng.exponential(1.5, n)).astype(F32) for n in lengths]
    train = [(r + noise * rng.standard_normal(len(r))).astype(F32) for r in rollout]
    mask = [rng.random(n) < 0.7 for n in lengths]
    mask[0][:] = True
    return train, rollout, mask


def naive(train, rollout, mask, rollouts) -> dict[str, float]:
    """All metrics of finite, masked tokens, in plain Python."""
    rows = [
        [(float(a), float(b)) for a, b, m in zip(t, r, k, strict=True) if m]
        for t, r, k in zip(train, rollout, mask, strict=True)
    ]
    pairs = [p for row in rows for p in row]
    d = [a - b for a, b in pairs]
    n = len(d)
    absolute = sorted(abs(x) for x in d)
    pooled: dict[str, list[float]] = {}
    for row, name in zip(rows, rollouts, strict=True):
        pooled.setdefault(name, []).extend(abs(a - b) for a, b in row)
    per_rollout = [sum(v) / len(v) for v in pooled.values() if v]
    sums = [sum(a - b for a, b in row) for row in rows if row]
    means = [sum(b for _, b in row) / len(row) - sum(a for a, _ in row) / len(row) for row in rows if row]
    w = [math.exp(x) for x in d]
    gaps = [abs(math.exp(a) - math.exp(b)) for a, b in pairs]
    clamp = lambda x: max(-20.0, min(20.0, x))  # noqa: E731
    return {
        "abs_diff/mean": sum(absolute) / n,
        "abs_diff/p50": float(np.quantile(absolute, 0.5)),
        "abs_diff/p99": float(np.quantile(absolute, 0.99)),
        "abs_diff/p999": float(np.quantile(absolute, 0.999)),
        "abs_diff/max": absolute[-1],
        "abs_diff/rollout_mean": sum(per_rollout) / len(per_rollout),
        "signed/mean": sum(d) / n,
        "k1": -sum(d) / n,
        "k3": sum(math.exp(x) - 1 - x for x in d) / n,
        "ratio/min": min(w),
        "ratio/max": max(w),
        "ess": sum(w) ** 2 / (n * sum(x * x for x in w)),
        "mult_error": sum(math.exp(abs(x)) for x in d) / n,
        "prob_diff/mean": sum(gaps) / n,
        "prob_diff/max": max(gaps),
        "prob_diff/std": float(np.std(gaps, ddof=1)),
        "prob_diff/pearson": float(np.corrcoef(np.exp([p[0] for p in pairs]), np.exp([p[1] for p in pairs]))[0, 1]),
        "seq_sum/p50": float(np.quantile(np.abs(sums), 0.5)),
        "seq_sum/p99": float(np.quantile(np.abs(sums), 0.99)),
        "seq_sum/max": max(abs(s) for s in sums),
        "log_ppl_diff": sum(means) / len(means),
        "log_ppl_abs_diff": sum(abs(m) for m in means) / len(means),
        "chi2_token": sum(math.exp(2 * clamp(x)) for x in d) / n - 1,
        "chi2_seq": sum(math.exp(2 * clamp(s)) for s in sums) / len(sums) - 1,
    }


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0001, 2.0))
def test_every_metric_is_its_definition(seed, noise):
    train, rollout, mask = make_case(seed, noise=noise)
    rollouts = ["a", "b", "a", "c"]
    got = measure(train, rollout, mask, rollout_ids=rollouts)
    assert got.metrics == pytest.approx(naive(train, rollout, mask, rollouts), rel=1e-8, abs=1e-12)
    assert got.num_tokens == sum(int(m.sum()) for m in mask)
    assert (got.num_stale, got.num_nonfinite, got.num_rejected, got.unjudged) == (0, 0, None, False)


def test_list_padded_and_flat_layouts_agree_on_arrays_and_tensors():
    train, rollout, mask = make_case(1)
    rollouts = ["a", "b", "a", "c"]
    expected = measure(train, rollout, mask, rollout_ids=rollouts)

    def padded(rows, fill):
        out = torch.full((4, 8), fill, dtype=torch.as_tensor(rows[0]).dtype)
        for i, row in enumerate(rows):
            out[i, : len(row)] = torch.as_tensor(row)
        return out

    two_d = measure(padded(train, math.nan), padded(rollout, math.nan), padded(mask, False), rollout_ids=rollouts)
    rows = [i for i, r in enumerate(train) for _ in r]
    flat = measure(
        np.concatenate(train),
        torch.as_tensor(np.concatenate(rollout)),
        np.concatenate(mask),
        sequence_ids=rows,
        rollout_ids=[rollouts[i] for i in rows],
    )
    for other in (two_d, flat):
        assert other.metrics == pytest.approx(expected.metrics, rel=1e-12)
        assert other.buckets == expected.buckets
    assert expected.worst is not None
    assert two_d.worst == expected.worst


def test_lists_of_plain_numbers_are_flat_and_lists_of_lists_are_rows():
    flat = measure([-1.0, -2.0], [-1.5, -2.0], [1, 1])
    assert flat.metrics["abs_diff/mean"] == 0.25
    assert "seq_sum/max" not in flat.metrics
    rows = measure([[-1.0], [-2.0]], [[-1.5], [-2.0]], [[1], [1]])
    assert rows.metrics["seq_sum/max"] == 0.5


def test_flat_input_without_ids_has_no_metrics_by_sequence():
    got = measure(torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -2.0]), torch.tensor([True, True]))
    assert "abs_diff/mean" in got.metrics
    assert not {"seq_sum/max", "log_ppl_diff", "chi2_seq", "abs_diff/rollout_mean"} & set(got.metrics)
    assert "position" not in got.buckets


def test_identical_sides_agree_exactly():
    train, _, mask = make_case(2)
    got = measure(train, train, mask).metrics
    zero = {
        k: v for k, v in got.items() if k not in ("ratio/min", "ratio/max", "ess", "mult_error", "prob_diff/pearson")
    }
    assert set(zero.values()) == {0.0}
    assert got["ratio/min"] == got["ratio/max"] == got["mult_error"] == 1.0
    assert got["ess"] == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_tokens_are_counted_and_the_rest_is_measured_without_them(bad, side):
    case = make_case(3)
    clean = [m.copy() for m in case[2]]
    clean[0][2] = False
    expected = measure(case[0], case[1], clean)
    case[side][0][2] = bad
    got = measure(*case)
    assert got.num_nonfinite == 1
    assert got.num_tokens == expected.num_tokens
    assert got.metrics == pytest.approx(expected.metrics)
    assert got.worst is not None
    assert (got.worst.row, got.worst.column) == (0, 2)
    assert all(math.isfinite(v) for v in got.metrics.values())


def test_a_leaked_pad_is_caught_by_an_impossible_sentinel():
    """A pad position that gets into the mask holds NaN, never a believable number (B21)."""
    train, rollout, mask = make_case(4)
    rollout[1][0], mask[1][0] = math.nan, True
    assert measure(train, rollout, mask).num_nonfinite == 1
    mask[1][0] = False
    assert measure(train, rollout, mask).num_nonfinite == 0


def test_stale_tokens_are_set_apart_by_sampling_and_by_cache_version():
    train, rollout, mask = make_case(5)
    versions = [np.full(len(t), 7) for t in train]
    kv = [v.copy() for v in versions]
    versions[0][:2] = 6  # sampled by an older policy
    kv[0][3] = 5  # sampled by this one, over keys and values of an older one
    train[0][[0, 1, 3]] += 100
    got = measure(train, rollout, mask, versions=versions, kv_versions=kv, version=7)
    kept = [m.copy() for m in mask]
    kept[0][[0, 1, 3]] = False
    assert got.num_stale == 3
    assert got.metrics == pytest.approx(measure(train, rollout, kept).metrics)
    assert got.buckets["version"]["6"].num_tokens == 2
    assert got.buckets["version"]["6"].abs_diff_mean > 99
    assert got.buckets["version"]["7"].num_tokens == got.num_tokens + 1
    with pytest.raises(ValueError, match="`version`"):
        measure(train, rollout, mask, versions=versions)


def test_a_stale_token_that_is_not_finite_still_counts():
    nan = torch.tensor([math.nan, -1.0])
    got = measure(nan, nan, torch.tensor([True, False]), versions=torch.tensor([3, 3]), version=4)
    assert (got.num_tokens, got.num_stale, got.num_nonfinite, got.unjudged) == (0, 1, 1, False)


@pytest.mark.parametrize("mask", [[False, False], [True, True]])
def test_zero_eligible_tokens_are_unjudged_with_no_metric_at_all(mask):
    values = torch.tensor([-1.0, -2.0])
    got = measure(values, values, torch.tensor(mask), versions=torch.tensor([1, 1]), version=2, rollout_ids=["a", "a"])
    assert got.unjudged
    assert got.metrics == {}
    assert got.worst is None
    assert got.num_stale == sum(mask)
    assert got.flat()["agreement/unjudged"] == 1
    assert measure([], [], []).unjudged


def test_undefined_metrics_are_absent():
    one = measure(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([True])).metrics
    assert not {"prob_diff/std", "prob_diff/pearson", "argmax_agree", "route_agree"} & set(one)
    constant = measure(torch.full((3,), -1.0), torch.tensor([-1.0, -2.0, -3.0]), torch.ones(3, dtype=torch.bool))
    assert "prob_diff/pearson" not in constant.metrics
    assert "prob_diff/std" in constant.metrics


def test_huge_differences_stay_finite():
    got = measure(
        torch.tensor([-1e5, 0.0]), torch.tensor([0.0, -1e5]), torch.ones(2, dtype=torch.bool), rollout_ids=[0, 1]
    )
    assert all(math.isfinite(v) for v in got.metrics.values())
    assert got.metrics["abs_diff/max"] == 1e5
    assert got.metrics["chi2_token"] == pytest.approx((math.exp(40) + math.exp(-40)) / 2 - 1)
    assert got.metrics["ess"] == pytest.approx(0.5)


def test_argmax_agreement_leaves_out_unknown_positions():
    values, mask = torch.full((4,), -1.0), torch.ones(4, dtype=torch.bool)
    got = measure(values, values, mask, train_top1=torch.tensor([5, 6, 7, -1]), rollout_top1=torch.tensor([5, 9, 7, 3]))
    assert got.metrics["argmax_agree"] == pytest.approx(2 / 3)
    zeros = measure(
        values, values, mask, train_top1=torch.tensor([0, 0, 4, 0]), rollout_top1=torch.tensor([0, 3, 0, -1])
    )
    assert zeros.metrics["argmax_agree"] == pytest.approx(1 / 3)  # token 0 is a token
    with pytest.raises(ValueError, match="belong together"):
        measure(values, values, mask, train_top1=torch.tensor([5, 6, 7, -1]))


def test_route_agreement_compares_sets_per_token_and_layer():
    train = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [-1, -1]]], dtype=np.int16)
    engine = train.copy()
    engine[0] = [[1, 0], [3, 2]]  # same sets in another order
    engine[1, 1] = [2, 5]  # one layer differs
    engine[2] = -1  # served from a cache that kept no ids
    values = torch.tensor([-1.0, -2.0, -1.0, -1.0])
    moved = values + torch.tensor([0.0, 0.5, 0.0, 0.0])
    got = measure(moved, values, torch.ones(4, dtype=torch.bool), train_routes=train, rollout_routes=engine)
    assert got.metrics["route_agree"] == pytest.approx(4 / 5)
    routes = got.buckets["routes"]
    assert {k: b.num_tokens for k, b in routes.items()} == {"equal": 2, "flipped": 1, "unknown": 1}
    assert routes["flipped"].abs_diff_mean == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint8, np.uint16, np.int64])
def test_routes_of_any_type_are_compared_layer_by_layer(dtype):
    """Against loops, with more layers than experts per token, expert 0 among them, and ids that are not known."""
    rng = np.random.default_rng(11)
    missing = np.iinfo(dtype).max if np.dtype(dtype).kind == "u" else -1
    sides = np.stack([np.stack([rng.permutation(4)[:2] for _ in range(120)]).reshape(40, 3, 2) for _ in range(2)])
    sides[1][:20] = sides[0][:20, :, ::-1]  # half of the tokens agree, in another order
    lost = rng.random((2, 40, 3)) < 0.2
    lost[0, 7] = True
    sides = np.where(lost[..., None], missing, sides).astype(dtype)
    agree = known = 0
    labels = []
    for token in range(40):
        equal = [
            set(sides[0, token, layer].tolist()) == set(sides[1, token, layer].tolist())
            for layer in range(3)
            if not lost[:, token, layer].any()
        ]
        agree, known = agree + sum(equal), known + len(equal)
        labels.append("unknown" if not equal else "equal" if all(equal) else "flipped")
    values = torch.full((40,), -1.0)
    got = measure(values, values, torch.ones(40), train_routes=sides[0], rollout_routes=sides[1])
    assert got.metrics["route_agree"] == pytest.approx(agree / known)
    assert {k: b.num_tokens for k, b in got.buckets["routes"].items()} == {k: labels.count(k) for k in set(labels)}
    assert set(labels) == {"unknown", "equal", "flipped"}


def test_buckets_partition_the_tokens_and_find_the_place():
    """The first sampled token is off, on one replica only."""
    rollout = [np.linspace(-5, -0.1, 12, dtype=F32) for _ in range(6)]
    train = [r.copy() for r in rollout]
    mask = [np.array([False] * 2 + [True] * 10) for _ in range(6)]
    for row in (1, 4):
        train[row][2] += 1.0
    got = measure(train, rollout, mask, replicas=[0, 1, 2, 0, 1, 2])
    for name, buckets in got.buckets.items():
        assert sum(b.num_tokens for b in buckets.values()) == 60, name
    assert {k: b.num_tokens for k, b in got.buckets["position"].items()} == {
        "0": 6,
        "1": 6,
        "2-3": 12,
        "4-7": 24,
        "8-15": 12,
    }
    assert {k for k, b in got.buckets["position"].items() if b.abs_diff_max > 0} == {"0"}
    assert {k for k, b in got.buckets["replica"].items() if b.abs_diff_max > 0} == {"1"}
    assert list(got.buckets["decile"]) == [str(i) for i in range(10)]
    assert {k for k, b in got.buckets["decile"].items() if b.abs_diff_max > 0} == {"0"}  # also the least likely token


def test_given_positions_override_the_rank_in_the_row():
    values = torch.full((1, 3), -1.0)
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = measure(values, values, mask, positions=torch.tensor([[100, 5, 0]]))
    assert set(got.buckets["position"]) == {"0", "4-7", "64-127"}
    measure(values, values, torch.tensor([[0, 1, 1]]), positions=torch.tensor([[-1, 0, 1]]))
    with pytest.raises(ValueError, match="positions holds -1 for a token whose mask is 1"):
        measure(values, values, mask, positions=torch.tensor([[-1, 0, 1]]))


def test_temperature_on_one_side_only_is_visible_from_the_first_token():
    """Raw log-probs on one side, temperature 0.6 on the other, no training step taken (B1)."""
    rng = np.random.default_rng(6)
    logits = torch.tensor(rng.standard_normal((400, 50)) * 2)
    noise = torch.tensor(rng.gumbel(size=(400, 50)))
    ids = torch.argmax(logits / 0.6 + noise, 1)  # sampled at temperature 0.6

    def pick(scaled):
        return torch.log_softmax(scaled, -1).gather(1, ids[:, None]).squeeze(1)

    mask = torch.ones(400, dtype=torch.bool)
    same = measure(pick(logits / 0.6), pick(logits / 0.6), mask)
    mixed = measure(pick(logits / 0.6), pick(logits), mask)
    assert same.metrics["abs_diff/max"] == 0.0
    assert mixed.metrics["abs_diff/mean"] > 0.2
    assert mixed.metrics["signed/mean"] > 0.1  # the sharper side is more sure of what it sampled


def test_a_shift_by_one_place_is_visible():
    """The next-token shift applied on one side only (B15)."""
    _, rollout, _ = make_case(7, lengths=(5,))
    mask = [np.array([False, True, True, True, True])]
    assert measure(rollout, rollout, mask).metrics["abs_diff/max"] == 0.0
    assert measure([np.roll(rollout[0], 1)], rollout, mask).metrics["abs_diff/mean"] > 0.1


def test_rejected_tokens_are_measured_all_the_same_and_counted():
    train, rollout, mask = make_case(8)
    rejected = [m & (np.arange(len(m)) == 0) for m in mask]
    got = measure(train, rollout, mask, rejected=rejected)
    assert got.num_rejected == sum(int(r.sum()) for r in rejected)
    assert got.metrics == measure(train, rollout, mask).metrics
    assert got.flat("a/")["a/rejected"] == got.num_rejected


def test_self_difference_is_the_largest_gap_between_two_passes():
    train, rollout, mask = make_case(9)
    got = self_difference(train, rollout, mask)
    assert got == {"self/max": measure(train, rollout, mask).metrics["abs_diff/max"], "self/nonfinite": 0.0}
    nan = [np.full(len(t), math.nan, dtype=F32) for t in train]
    assert set(self_difference(train, nan, mask)) == {"self/nonfinite"}


def test_low_precision_and_gradient_carrying_inputs_are_taken_as_they_are():
    live = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    got = measure(live, torch.tensor([-1.25, -2.0]), torch.ones(2, dtype=torch.bool))
    assert got.metrics["abs_diff/max"] == 0.25


def test_wrong_shapes_are_refused_by_name():
    train, rollout, mask = make_case(10)
    with pytest.raises(ValueError, match="rollout_logprobs has rows of"):
        measure(train, rollout[:-1], mask)
    with pytest.raises(ValueError, match="mask has rows of"):
        measure(train, rollout, [m[:-1] for m in mask])
    with pytest.raises(ValueError, match="rollout_ids has 3 entries; needed: 4"):
        measure(train, rollout, mask, rollout_ids=["a", "b", "c"])
    with pytest.raises(ValueError, match="not of shape"):
        measure(torch.zeros(2, 2, 2), torch.zeros(2, 2, 2), torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match=r"mask has \[1\] values per token; needed: one value per token"):
        measure(torch.zeros(2), torch.zeros(2), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"rollout_logprobs has \[5\] values per token"):
        measure(torch.zeros(2), torch.zeros(2, 5), torch.ones(2))
    one, two = torch.zeros(2, 1, 1, dtype=torch.long), torch.zeros(2, 1, 2, dtype=torch.long)
    with pytest.raises(
        ValueError, match=r"train_routes and rollout_routes have \[1, 1\] and \[1, 2\] values per token"
    ):
        measure(torch.zeros(2), torch.zeros(2), torch.ones(2), train_routes=one, rollout_routes=two)


@pytest.mark.parametrize("mask", [[0.5, 1.0], [2, 1], [math.nan, 1.0], [-1, 1]])
def test_weights_are_no_mask(mask):
    with pytest.raises(ValueError, match="mask holds other numbers than 0 and 1"):
        measure(torch.zeros(2), torch.zeros(2), torch.tensor(mask))
    with pytest.raises(ValueError, match="rejected holds other numbers"):
        measure(torch.zeros(2), torch.zeros(2), torch.ones(2), rejected=torch.tensor(mask))


def test_a_trainers_version_without_those_of_the_tokens_is_refused():
    """All would pass as fresh."""
    with pytest.raises(ValueError, match="without versions or kv_versions of the tokens"):
        measure(torch.zeros(2), torch.zeros(2), torch.ones(2), version=3)


@pytest.mark.parametrize("name", ["train_logprobs", "rollout_logprobs", "mask", "versions", "positions", "rejected"])
@pytest.mark.parametrize("value", [None, "x", [-1.0, None], [[-1.0], [None]], np.array([-1.0, None], dtype=object)])
def test_values_that_are_no_numbers_are_refused_by_name(name, value):
    """An engine that reports no log-prob for some token says None."""
    rows = isinstance(value, list) and isinstance(value[0], list)
    fine = [[-1.0], [-1.0]] if rows else [-1.0, -1.0]
    whole = [[1], [1]] if rows else [1, 1]
    given = {"train_logprobs": fine, "rollout_logprobs": fine, "mask": whole, "versions": whole, "positions": whole}
    given |= {"rejected": whole, name: value}
    if value is None and name in ("versions", "positions", "rejected"):
        assert measure(**given, kv_versions=whole, version=1).num_tokens == 2
        return
    with pytest.raises(ValueError, match=f"{name} holds values that are no numbers"):
        measure(**given, version=1)


@pytest.mark.parametrize("dtype", [">f4", ">f8", "longdouble", "float16"])
def test_any_float_of_any_machine_is_taken_for_what_it_is(dtype):
    train, rollout, _ = make_case(3, noise=0.0)
    shifted = [(r - 0.5).astype(F32) for r in rollout]
    expected = measure(np.concatenate(train).astype(dtype).astype(np.float64), np.concatenate(shifted), [1] * 17)
    got = measure(np.concatenate(train).astype(dtype), np.concatenate(shifted).astype(">f4"), np.ones(17, dtype=">i8"))
    assert got.metrics == expected.metrics


@pytest.mark.parametrize("wrap", [torch.tensor, np.int64, np.array, lambda v: torch.tensor([v])[0]])
def test_equal_ids_are_one_whatever_holds_them(wrap):
    """A tensor's elements are objects of their own: three rollouts instead of two."""
    ids = [7, 7, 8]
    case = ([[-1.0], [-2.0], [-3.0]], [[-1.5], [-2.0], [-3.1]], [[1], [1], [1]])
    expected = measure(*case, rollout_ids=ids, sequence_ids=ids, replicas=ids)
    got = measure(
        *case, rollout_ids=[wrap(i) for i in ids], sequence_ids=tuple(map(wrap, ids)), replicas=[*map(wrap, ids)]
    )
    assert got.metrics == expected.metrics
    assert got.buckets == expected.buckets
    assert got.worst == expected.worst
    assert set(got.buckets["replica"]) == {"7", "8"}


@pytest.mark.parametrize("version", [[1, 1], (1,), np.array([1, 1]), torch.tensor([1])])
def test_the_trainers_version_is_one_number(version):
    """A list equals no token's version: everything would be stale."""
    with pytest.raises(ValueError, match="version is the trainer's own, one number"):
        measure(torch.zeros(2), torch.zeros(2), torch.ones(2), versions=[1, 1], version=version)


def test_the_module_needs_nothing_but_torch_and_numpy():
    code = (
        "import sys, lockstep.agreement; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('transformers', 'pydantic', 'typer', 'rich', 'pyarrow') or m.startswith('lockstep.')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert eval(out.stdout) == [f"lockstep.agreement{part}" for part in ("", "_layout", "_partial", "_sketch")]
