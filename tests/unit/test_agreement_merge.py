"""Merging partial measurements: exact where exactness is promised, within the stated error where it is not."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.agreement import finish, measure, merge, merge_ranks
from lockstep.agreement_partial import NUM_WORST, QUANTILES, Groups, Moments, Partial
from lockstep.agreement_sketch import RELATIVE_ERROR, SMALLEST, counts_of, merge_counts, quantiles

SKETCHED = {f"abs_diff/{name}" for name in QUANTILES}


def rows_of(seed: int, num_rows: int = 9, scale: float = 0.05):
    """Rows of both sides with some stale and some broken tokens, and what identifies them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 30, num_rows)
    rollout = [(-rng.exponential(1.5, n)).astype(np.float32) for n in lengths]
    train = [
        (r + scale * rng.standard_normal(len(r)) * rng.exponential(1.0, len(r))).astype(np.float32) for r in rollout
    ]
    mask = [rng.random(n) < 0.8 for n in lengths]
    versions = [np.where(rng.random(n) < 0.1, 6, 7) for n in lengths]
    if rng.random() < 0.5 and lengths.max() > 0:
        train[int(lengths.argmax())][0] = math.nan
    return train, rollout, mask, versions, [f"r{i // 2}" for i in range(num_rows)], [i % 3 for i in range(num_rows)]


def measured(case, rows):
    train, rollout, mask, versions, rollouts, replicas = ([column[i] for i in rows] for column in case)
    return measure(
        train, rollout, mask, sequence_ids=[f"s{i}" for i in rows], rollout_ids=rollouts, replicas=replicas,
        versions=versions, version=7, rejected=[m & (np.arange(len(m)) % 2 == 0) for m in mask],
    )  # fmt: skip


def assert_same(merged, whole):
    """Exact counts and maxima, means to rounding, quantiles within the sketch's error."""
    assert merged.metrics.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        if name in SKETCHED:
            assert merged.metrics[name] == pytest.approx(value, rel=RELATIVE_ERROR * 1.0001, abs=SMALLEST), name
        elif name.endswith(("/max", "/min")):
            assert merged.metrics[name] == pytest.approx(value, rel=1e-14), name
        else:
            assert merged.metrics[name] == pytest.approx(value, rel=1e-10, abs=1e-13), name
    for name in ("num_tokens", "num_stale", "num_nonfinite", "num_rejected"):
        assert getattr(merged, name) == getattr(whole, name), name
    assert [token.badness for token in merged.worst_tokens] == [token.badness for token in whole.worst_tokens]
    for kind in whole.buckets.keys() - {"decile"}:
        ours, theirs = merged.buckets[kind], whole.buckets[kind]
        assert ours.keys() == theirs.keys()
        for label, bucket in theirs.items():
            assert ours[label].num_tokens == bucket.num_tokens
            assert ours[label].abs_diff_max == bucket.abs_diff_max
            assert ours[label].abs_diff_mean == pytest.approx(bucket.abs_diff_mean, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_any_split_over_parts_merges_to_the_whole(seed, part_of):
    """Rollouts of two sequences fall apart in many of these splits; some parts are empty."""
    case = rows_of(seed)
    parts = [measured(case, [i for i in range(9) if part_of[i] == part]).partial for part in range(4)]
    assert_same(finish(merge(parts)), measured(case, range(9)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.permutations(range(3)))
def test_merging_is_commutative_and_associative(seed, order):
    case = rows_of(seed)
    parts = [measured(case, rows).partial for rows in (range(3), range(3, 6), range(6, 9))]
    flat = finish(merge(parts))
    shuffled = finish(merge([parts[i] for i in order]))
    assert shuffled.metrics == flat.metrics  # to the last bit
    nested = finish(merge([parts[0], merge([parts[1], parts[2]])]))
    other = finish(merge([merge([parts[0], parts[1]]), parts[2]]))
    assert_same(nested, other)
    assert {k: nested.metrics[k] for k in SKETCHED & nested.metrics.keys()} == {
        k: other.metrics[k] for k in SKETCHED & other.metrics.keys()
    }


def test_tokens_of_one_sequence_may_be_spread_over_context_parallel_shards():
    """Sums by sequence are of the whole sequence: halves that cancel are not taken for two bad sequences."""
    train, rollout = torch.tensor([-1.0, -1.5, -2.0, -1.0]), torch.tensor([-1.5, -1.0, -2.5, -0.5])
    mask, ids = torch.ones(4, dtype=torch.bool), ["a"] * 4
    halves = [
        measure(train[s], rollout[s], mask[s], sequence_ids=ids[s], positions=torch.arange(4)[s])
        for s in (slice(0, 1), slice(1, 4))
    ]
    merged, whole = finish(merge([half.partial for half in halves])), measure(train, rollout, mask, sequence_ids=ids)
    assert merged.metrics["seq_sum/max"] == whole.metrics["seq_sum/max"] == 0.0
    assert merged.metrics["abs_diff/rollout_mean"] == 0.5
    assert merged.buckets["position"] == whole.buckets["position"]


def test_rows_without_ids_of_different_parts_are_different_sequences():
    part = measure(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.0]]), torch.ones(1, 2)).partial
    merged = finish(merge([part, part]))
    assert merged.metrics["seq_sum/max"] == 0.5
    assert (merged.num_tokens, merged.partial.sequences) == (4, Groups(unnamed=((2, 0.5, 0.5),) * 2))


def test_metrics_by_sequence_are_absent_if_one_part_does_not_know_its_sequences():
    values, mask = torch.tensor([-1.0, -2.0]), torch.ones(2, dtype=torch.bool)
    known, unknown = measure([values], [values], [mask]).partial, measure(values, values, mask).partial
    assert "seq_sum/max" in finish(known).metrics
    assert "seq_sum/max" not in finish(merge([known, unknown])).metrics
    assert finish(merge([known, unknown])).num_tokens == 4


def test_nothing_merged_is_unjudged_and_a_part_without_tokens_changes_nothing():
    values = torch.tensor([-1.0, -2.0])
    empty = measure(values, values, torch.zeros(2, dtype=torch.bool)).partial
    full = measure(values, values + 0.5, torch.ones(2, dtype=torch.bool)).partial
    assert finish(merge([])).unjudged
    assert finish(merge([empty, empty])).unjudged
    assert finish(merge([empty, full])).metrics == finish(full).metrics
    assert merge_ranks(full) is full  # no process group here


def test_unequal_parts_are_weighted_by_their_tokens_not_averaged():
    """One rank with one bad token beside one with 99 good ones: the mean of means would say 0.5."""
    bad = measure(torch.tensor([-2.0]), torch.tensor([-1.0]), torch.ones(1)).partial
    good = measure(torch.full((99,), -1.0), torch.full((99,), -1.0), torch.ones(99)).partial
    assert finish(merge([bad, good])).metrics["abs_diff/mean"] == 0.01


def test_a_non_finite_token_of_any_part_survives_as_the_worst():
    case = [torch.tensor([-1.0, math.nan]), torch.tensor([-9.0, -1.0])]
    parts = [
        measure(t, torch.tensor([-1.0, -1.0]), torch.ones(2), sequence_ids=[i, i]).partial for i, t in enumerate(case)
    ]
    for order in (parts, parts[::-1]):
        merged = finish(merge(order))
        assert merged.num_nonfinite == 1
        assert merged.worst is not None
        assert (merged.worst.sequence, merged.worst.column) == (0, 1)


def test_a_part_that_is_not_finite_anywhere_is_merged():
    """A rank whose weights are NaN has no finite token to show, and must not vanish among the healthy ones."""
    values, mask = torch.tensor([-1.0, -2.0]), torch.ones(2)
    healthy, broken = measure(values, values, mask).partial, measure(values * math.nan, values, mask).partial
    for parts in ([healthy, broken], [broken, healthy], [broken]):
        merged = finish(merge(parts))
        assert (merged.num_nonfinite, merged.num_tokens) == (2, 2 * (len(parts) - 1))
        assert not merged.unjudged
        assert merged.worst is not None
        assert math.isnan(merged.worst.train)


def test_agreeing_argmax_and_routes_are_pooled_over_the_parts_that_know_them():
    values, mask = torch.full((3,), -1.0), torch.ones(3)
    one = measure(values, values, mask, train_top1=torch.tensor([1, 2, 3]), rollout_top1=torch.tensor([1, 2, 4]))
    routes = torch.tensor([[[0, 1]], [[2, 3]], [[4, 5]]])
    other = measure(
        values, values, mask,
        train_top1=torch.tensor([1, 1, -1]), rollout_top1=torch.tensor([1, 1, 1]),
        train_routes=routes, rollout_routes=routes.flip(0),
    )  # fmt: skip
    silent = measure(values, values, mask)
    merged = finish(merge([one.partial, silent.partial, other.partial])).metrics
    assert merged["argmax_agree"] == pytest.approx(4 / 5)
    assert merged["route_agree"] == pytest.approx(1 / 3)


def test_rejected_tokens_are_told_only_if_every_part_tells_them():
    values, mask = torch.tensor([-1.0, -2.0]), torch.ones(2)
    told, silent = measure(values, values, mask, rejected=torch.tensor([1, 0])), measure(values, values, mask)
    nothing = measure(values, values, torch.zeros(2))
    assert finish(merge([told.partial, told.partial])).num_rejected == 2
    assert finish(merge([told.partial, silent.partial])).num_rejected is None
    assert finish(merge([told.partial, nothing.partial])).num_rejected == 1


def test_the_worst_tokens_are_the_largest_differences_in_order():
    rng = np.random.default_rng(0)
    values = torch.tensor(rng.standard_normal(500))
    got = measure(values, torch.zeros(500), torch.ones(500))
    expected = sorted(values.abs().tolist(), reverse=True)[:NUM_WORST]
    assert [token.badness for token in got.worst_tokens] == pytest.approx(expected)
    assert got.worst == got.worst_tokens[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 400), st.floats(-14, 3))
def test_sketched_quantiles_are_within_the_stated_relative_error(seed, size, exponent):
    rng = np.random.default_rng(seed)
    values = np.abs(rng.standard_normal(size)) * 10**exponent * rng.exponential(1, size) ** 3
    values[rng.random(size) < 0.1] = 0.0
    shares = [0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0]
    parts = np.array_split(values, 3)
    sketch = merge_counts(counts_of(torch.tensor(part)) for part in parts)
    assert sketch == counts_of(torch.tensor(values))
    for got, exact in zip(quantiles(sketch, shares), np.quantile(values, shares), strict=True):
        assert got == pytest.approx(exact, rel=RELATIVE_ERROR * (1 + 1e-9), abs=SMALLEST)


def test_sketched_deciles_hold_the_same_tokens_up_to_those_at_the_edges():
    rng = np.random.default_rng(3)
    rollout = torch.tensor(-rng.exponential(1.5, 4000))
    train = rollout + torch.tensor(0.1 * rng.standard_normal(4000)) * rollout.abs()
    exact = measure(train, rollout, torch.ones(4000))
    rough = finish(exact.partial)
    assert list(rough.buckets["decile"]) == [str(i) for i in range(10)]
    for label, bucket in exact.buckets["decile"].items():
        assert rough.buckets["decile"][label].num_tokens == pytest.approx(bucket.num_tokens, abs=40)
        assert rough.buckets["decile"][label].abs_diff_mean == pytest.approx(bucket.abs_diff_mean, rel=0.05)


def test_moments_of_nearly_equal_values_do_not_cancel():
    values = np.float64(0.999) + 1e-9 * np.random.default_rng(1).standard_normal(1000)
    parts = [
        Moments(len(v), v.mean(), v.mean(), *([float(((v - v.mean()) ** 2).sum())] * 3))
        for v in np.array_split(values, 7)
    ]
    assert Moments.merge(parts).xx / 999 == pytest.approx(values.var(ddof=1), rel=1e-6)


def test_a_partial_is_plain_data_that_travels():
    part = measured(rows_of(5), range(9)).partial
    assert finish(pickle.loads(pickle.dumps(part))).metrics == finish(part).metrics
    assert merge([]) == Partial()


RANKS = """
import sys, torch, numpy as np
from torch import distributed
from lockstep.agreement import finish, measure, merge_ranks
rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
rng = np.random.default_rng(7)
rollout = torch.tensor(-rng.exponential(1.5, 1000)); train = rollout + 0.1 * torch.tensor(rng.standard_normal(1000))
ids = [i // 50 for i in range(1000)]
part = slice(0, 330) if rank == 0 else slice(330, 1000)
own = measure(train[part], rollout[part], torch.ones(1000)[part], sequence_ids=ids[part])
merged = finish(merge_ranks(own.partial))
whole = measure(train, rollout, torch.ones(1000), sequence_ids=ids)
for name, value in whole.metrics.items():
    error = 0.005 if name in ("abs_diff/p50", "abs_diff/p99", "abs_diff/p999") else 1e-10
    assert abs(merged.metrics[name] - value) <= error * abs(value) + 1e-14, (name, merged.metrics[name], value)
print(merged.num_tokens, merged.metrics["abs_diff/mean"].hex(), merged.metrics["abs_diff/p99"].hex())
distributed.destroy_process_group()
"""


def test_two_processes_reduce_to_the_whole_and_agree_with_each_other(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(RANKS))
    runs = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], [error[-2000:] for _, error in outputs]
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][0].startswith("1000 ")
