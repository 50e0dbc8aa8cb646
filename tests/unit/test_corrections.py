"""Weights and rejections against their formulas, and what they do to the denominators."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.config.schema import AlgorithmConfig, CorrectionConfig, KlConfig
from lockstep.interfaces import LogProbs
from lockstep.records import Sequence, TrainSequence
from lockstep.train.corrections import apply_corrections, extra_pass_reasons, needs_extra_pass


def make_case(differences: dict[str, list[float]], rollout=lambda name: name):
    """Items with a prompt token, tokens with d = l_v − l_roll as given (None: a tool token), and the live log-probs."""
    items, live = [], {}
    for name, row in differences.items():
        mask = np.array([False] + [d is not None for d in row])
        base = np.where(mask, -2.0, 0.0)
        d = np.array([9.0] + [9.0 if v is None else v for v in row])  # values at masked positions must not matter
        ints = np.zeros(len(mask), dtype=np.int32)
        sequence = Sequence(name, ints, mask, base.astype(np.float32), ints, ints)
        items.append(TrainSequence(sequence, rollout(name), mask, np.ones(len(mask), dtype=np.float32)))
        live[name] = LogProbs((base + d).astype(np.float32), version=0)
    return items, live


def kept(item: TrainSequence) -> list[bool]:
    return item.loss_mask[item.sequence.loss_mask].tolist()


def weights(item: TrainSequence) -> list[float]:
    assert item.weights is not None
    return item.weights[item.sequence.loss_mask].tolist()


def test_tis_seq_clips_the_exponential_of_the_sum_and_leaves_mask_and_denominators():
    items, live = make_case({"a": [0.1, None, 0.2], "b": [0.5, 0.6], "c": [-30.0]})
    result = apply_corrections(items, live, CorrectionConfig(weight="tis_seq"))
    expected = [math.exp(0.3), 2.0, math.exp(-20)]
    for item, before, value in zip(result.items, items, expected, strict=True):
        assert weights(item) == pytest.approx([value] * len(weights(item)), rel=1e-6)
        assert item.loss_mask.tolist() == before.loss_mask.tolist()
    assert (result.denominator_tokens, result.denominator_rollouts) == (None, None)
    assert result.metrics["corrections/tis_seq_clipped_sequences"] == 1
    assert result.metrics["corrections/rejected_tokens"] == 0


def test_icepop_rejects_tokens_outside_its_interval_and_survivors_keep_their_ratio():
    d = [0.0, math.log(0.4), math.log(4.9), math.log(5.1), -0.1]
    items, live = make_case({"a": d})
    result = apply_corrections(items, live, CorrectionConfig(reject=("icepop",)))
    assert kept(result.items[0]) == [True, False, True, False, True]
    got = weights(result.items[0])
    assert [got[i] for i in (0, 2, 4)] == pytest.approx([1.0, 4.9, math.exp(-0.1)], rel=1e-5)
    assert result.metrics["corrections/icepop_tokens"] == 2
    assert result.metrics["corrections/rejected_tokens"] == 2
    assert result.metrics["corrections/ratio_mean"] == pytest.approx(np.mean(np.exp(d)), rel=1e-6)


def test_icepop_with_another_weight_or_bypass_does_not_weigh_twice():
    items, live = make_case({"a": [0.5, -0.2]})
    with_tis = apply_corrections(items, live, CorrectionConfig(weight="tis", reject=("icepop",)))
    assert with_tis.items[0].weights is None  # tis is computed in the objective
    with_seq = apply_corrections(items, live, CorrectionConfig(weight="tis_seq", reject=("icepop",)))
    assert weights(with_seq.items[0]) == pytest.approx([math.exp(0.3)] * 2, rel=1e-5)
    bypass = apply_corrections(items, live, CorrectionConfig(bypass=True, reject=("icepop",)))
    assert bypass.items[0].weights is None


@pytest.mark.parametrize(
    ("kind", "survives", "rejected"),
    [
        ("mis", [0.3, 0.3], [0.4, 0.3]),  # exp of the sum in [0.5, 2]
        ("mis", [-0.3, -0.3], [-0.4, -0.3]),
        ("geometric", [0.2, -0.19], [0.2, -0.17]),  # exp of the mean in [0.99, 1.01]
        ("geometric", [0.005] * 300, [0.012]),
        ("veto", [-9.2, 50.0], [0.0, -9.3]),  # no token below exp(d) = 1e-4
    ],
)
def test_sequence_rejections(kind, survives, rejected):
    items, live = make_case({"good": survives, "bad": [*rejected, None]})
    result = apply_corrections(items, live, CorrectionConfig(reject=(kind,)))
    assert kept(result.items[0]) == [True] * len(survives)
    assert kept(result.items[1]) == [False] * len(rejected)
    assert result.metrics[f"corrections/{kind}_sequences"] == 1
    assert result.metrics["corrections/rejected_sequences"] == 1
    assert result.items[0].weights is None


def test_rejections_do_not_depend_on_each_other():
    """All use the mask from before: a token that IcePop drops still counts in the sum of mis."""
    items, live = make_case({"a": [2.0, -0.1, -0.1]})
    both = CorrectionConfig(reject=("icepop", "mis"), icepop_high=5.0)
    result = apply_corrections(items, live, both)
    assert kept(result.items[0]) == [False] * 3
    assert apply_corrections(items, live, CorrectionConfig(reject=("mis", "icepop"))).items[0].loss_mask.sum() == 0


@pytest.mark.parametrize("denominator", ["kept", "fixed"])
def test_rejected_tokens_leave_the_denominator_unless_it_is_fixed(denominator):
    """5 tokens, 3 rejected: the mean is over 2, or over 5 on request (A11)."""
    items, live = make_case({"r/0": [3.0, 3.0], "r/1": [0.0], "s/0": [3.0, 0.0]}, rollout=lambda n: n[0])
    config = CorrectionConfig(reject=("icepop",), denominator=denominator)
    result = apply_corrections(items, live, config)
    assert sum(int(i.loss_mask.sum()) for i in result.items) == 2
    expected = (5, 2) if denominator == "fixed" else (None, None)
    assert (result.denominator_tokens, result.denominator_rollouts) == expected


def test_a_token_that_is_not_finite_is_inside_of_nothing_and_counted():
    items, live = make_case({"a": [0.0, 0.0], "b": [0.0]})
    live["a"].logprobs[1] = np.nan
    for kind in ("icepop", "mis", "geometric", "veto"):
        result = apply_corrections(items, live, CorrectionConfig(reject=(kind,)))
        assert kept(result.items[0])[0] is False
        assert kept(result.items[1]) == [True]
        assert result.metrics["corrections/nonfinite"] == 1
    weighted = apply_corrections(items, live, CorrectionConfig(weight="tis_seq"))
    assert all(math.isnan(w) for w in weights(weighted.items[0]))  # never silently a number


def test_items_without_counted_tokens_pass_through_and_need_no_log_probs():
    items, _ = make_case({"a": [None]})
    result = apply_corrections(items, {}, CorrectionConfig(reject=("mis",)))
    assert result.items == tuple(items)
    assert "corrections/ratio_mean" not in result.metrics


def test_without_corrections_nothing_is_needed_or_changed():
    items, _ = make_case({"a": [1.0]})
    for config in (CorrectionConfig(), CorrectionConfig(weight="tis")):
        result = apply_corrections(items, None, config)
        assert result.items == tuple(items)
        assert result.metrics == {}


def test_missing_log_probs_and_contradictions_are_refused():
    items, live = make_case({"a": [1.0]})
    with pytest.raises(ValueError, match="need live log-probs"):
        apply_corrections(items, None, CorrectionConfig(reject=("mis",)))
    with pytest.raises(ValueError, match="no live log-probs for sequence a"):
        apply_corrections(items, {}, CorrectionConfig(reject=("mis",)))
    with pytest.raises(ValueError, match="excludes correction weights"):
        apply_corrections(items, live, CorrectionConfig(bypass=True, weight="tis"))


def test_what_costs_the_extra_pass():
    free = [
        AlgorithmConfig(),
        AlgorithmConfig(corrections=CorrectionConfig(weight="tis")),
        AlgorithmConfig(kl=KlConfig(place="loss", coefficient=0.1)),
        AlgorithmConfig(optimizer_steps_per_batch=2, corrections=CorrectionConfig(bypass=True)),
    ]
    assert not any(needs_extra_pass(config) for config in free)
    costly = {
        "tis_seq": AlgorithmConfig(corrections=CorrectionConfig(weight="tis_seq")),
        "icepop": AlgorithmConfig(corrections=CorrectionConfig(reject=("icepop",))),
        "mis": AlgorithmConfig(corrections=CorrectionConfig(reject=("mis",), bypass=True)),
        "kl.place reward": AlgorithmConfig(kl=KlConfig(place="reward", estimator="k1", coefficient=0.1)),
        "distill": AlgorithmConfig(advantage="distill"),
        "optimizer_steps_per_batch 2": AlgorithmConfig(optimizer_steps_per_batch=2),
    }
    for word, config in costly.items():
        assert needs_extra_pass(config)
        assert word in " ".join(extra_pass_reasons(config))
