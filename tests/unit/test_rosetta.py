"""The numbers of other trainers, each by its own definition, against ours.

Each function states a definition read from the project's public source (named in its docstring), in numpy loops of our
own. ``docs/rosetta.md`` is the table of what is asserted here; a test holds the two together.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from lockstep.agreement import measure

ROSETTA = (Path(__file__).parents[2] / "docs" / "rosetta.md").read_text(encoding="utf-8")

TRAIN = [
    np.array([-0.11, -2.31, -0.02, -4.05, -0.69, -1.17]),
    np.array([-1.20, -0.40, -3.30]),
    np.array([-0.05, -0.75, -2.20, -0.01, -5.60]),
    np.array([-6.10, -0.33]),
]
ROLLOUT = [
    np.array([-0.10, -2.28, -0.02, -4.61, -0.70, -1.02]),
    np.array([-1.24, -0.41, -3.10]),
    np.array([-0.05, -0.71, -2.45, -0.01, -5.10]),
    np.array([-5.30, -0.35]),
]
MASK = [
    np.array([1, 1, 1, 1, 0, 1], dtype=bool),
    np.array([1, 1, 1], dtype=bool),
    np.array([0, 1, 1, 1, 1], dtype=bool),
    np.array([1, 1], dtype=bool),
]
OWNERS = ["a", "a", "b", "c"]
"""Rollout of each sequence: the first was cut into two samples."""

OURS = measure(TRAIN, ROLLOUT, MASK, rollout_ids=OWNERS).metrics


def pairs(index: int | None = None) -> list[tuple[float, float]]:
    """(trainer, engine) of the masked tokens of a sequence, or of all."""
    chosen = range(len(TRAIN)) if index is None else [index]
    return [(float(TRAIN[i][t]), float(ROLLOUT[i][t])) for i in chosen for t in np.flatnonzero(MASK[i])]


def mean(values) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def by_sequence(function) -> list[float]:
    return [function(pairs(i)) for i in range(len(TRAIN))]


# --- miles (loss_hub/losses.py, cp_utils.py, math_utils.py) and slime (megatron_utils/loss.py) ---


def miles_abs_diff(per_token: bool, owners: list[str] = OWNERS, num_rollouts: int = 3) -> float:
    """Sum over samples of masked sum / mask count of the sample's whole rollout (``rollout_mask_sums``, at least 1),
    reported over the number of rollouts; with per-token loss: the masked sum over the number of tokens."""
    if per_token:
        return sum(abs(a - b) for a, b in pairs()) / len(pairs())
    counts = {name: sum(len(pairs(i)) for i, owner in enumerate(owners) if owner == name) for name in owners}
    sums = [sum(abs(a - b) for a, b in pairs(i)) / max(1, counts[owner]) for i, owner in enumerate(owners)]
    return sum(sums) / num_rollouts


def miles_train_rollout_kl() -> float:
    """Per-token "low_var_kl" of (rollout, train): exp(train − rollout) − 1 − it, argument within ±20, value ±10."""
    ratios = [max(-20.0, min(20.0, a - b)) for a, b in pairs()]
    return mean(max(-10.0, min(10.0, math.exp(x) - 1 - x)) for x in ratios)


# --- verl (rollout_corr_helper.py: compute_offpolicy_metrics, compute_is_metrics; debug/metrics.py) ---


def verl(num_empty: int = 0) -> dict[str, float]:
    """Masked means divide by Σ mask + 1e-8; sequence figures are means over sequences, of which ``num_empty`` more have
    no counted token."""
    n = len(pairs()) + 1e-8
    log_ratio = [a - b for a, b in pairs()]
    gaps = by_sequence(lambda own: (sum(b for _, b in own) - sum(a for a, _ in own)) / (len(own) + 1e-8))
    sums = by_sequence(lambda own: sum(a - b for a, b in own))
    gaps, sums = [*gaps, *[0.0 / 1e-8] * num_empty], [*sums, *[0.0] * num_empty]
    weights = [math.exp(x) for x in log_ratio]
    scale = sum(weights) / n + 1e-8
    return {
        "rollout_corr/kl": sum(b - a for a, b in pairs()) / n,
        "rollout_corr/k3_kl": sum(math.exp(x) - x - 1 for x in log_ratio) / n,
        "rollout_corr/log_ppl_diff": mean(gaps),
        "rollout_corr/log_ppl_abs_diff": mean(abs(g) for g in gaps),
        "rollout_corr/chi2_token": sum(math.exp(max(-20.0, min(20.0, x))) ** 2 for x in log_ratio) / n - 1,
        "rollout_corr/chi2_seq": mean(math.exp(2 * max(-20.0, min(20.0, s))) for s in sums) - 1,
        "rollout_corr/rollout_is_eff_sample_size": 1 / (sum((w / scale) ** 2 for w in weights) / n),
    }


def verl_probs() -> dict[str, float]:
    p, q = np.exp([a for a, _ in pairs()]), np.exp([b for _, b in pairs()])
    gap = np.abs(p - q)
    return {
        "training/rollout_probs_diff_mean": float(gap.mean()),
        "training/rollout_probs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_std": float(gap.std(ddof=1)),
        "training/rollout_actor_probs_pearson_corr": float(np.corrcoef(p, q)[0, 1]),
    }


# --- NeMo RL (loss/loss_functions.py, utils.py: calculate_kl) ---


def nemo(kl_type: str) -> dict[str, float]:
    """logr = prev − generation, no clamps; means over the valid tokens."""
    logr = [a - b for a, b in pairs()]
    kl = {"k1": lambda x: -x, "k3": lambda x: math.exp(x) - 1 - x}[kl_type]
    return {
        "train/token_mult_prob_error": mean(math.exp(abs(b - a)) for a, b in pairs()),
        "train/gen_kl_error": mean(kl(x) for x in logr),
        "train/policy_kl_error": mean(kl(-x) for x in logr),
    }


# --- prime-rl (trainer/rl/loss.py: compute_importance_ratio_and_mismatch_kl; train.py) ---


def prime_rl_mismatch_kl() -> float:
    """ratio − log ratio − 1 of every masked token, mean over all of them."""
    return mean(math.exp(a - b) - (a - b) - 1 for a, b in pairs())


# --- TRL (grpo_trainer.py) ---


def trl() -> dict[str, float]:
    """One rank; importance ratios without a cap."""
    delta, ratio = [abs(a - b) for a, b in pairs()], [math.exp(a - b) for a, b in pairs()]
    return {
        "sampling/sampling_logp_difference/mean": mean(delta),
        "sampling/sampling_logp_difference/max": max(delta),
        "sampling/importance_sampling_ratio/min": min(ratio),
        "sampling/importance_sampling_ratio/max": max(ratio),
    }


EQUAL = {
    "train/train_rollout_logprob_abs_diff": (miles_abs_diff(per_token=False), "abs_diff/rollout_mean"),
    "--calculate-per-token-loss": (miles_abs_diff(per_token=True), "abs_diff/mean"),
    "train/train_rollout_kl": (miles_train_rollout_kl(), "k3"),
    "rollout_corr/kl": (verl()["rollout_corr/kl"], "k1"),
    "rollout_corr/k3_kl": (verl()["rollout_corr/k3_kl"], "k3"),
    "rollout_corr/log_ppl_diff": (verl()["rollout_corr/log_ppl_diff"], "log_ppl_diff"),
    "rollout_corr/log_ppl_abs_diff": (verl()["rollout_corr/log_ppl_abs_diff"], "log_ppl_abs_diff"),
    "rollout_corr/chi2_token": (verl()["rollout_corr/chi2_token"], "chi2_token"),
    "rollout_corr/chi2_seq": (verl()["rollout_corr/chi2_seq"], "chi2_seq"),
    "rollout_corr/rollout_is_eff_sample_size": (verl()["rollout_corr/rollout_is_eff_sample_size"], "ess"),
    "training/rollout_probs_diff_mean": (verl_probs()["training/rollout_probs_diff_mean"], "prob_diff/mean"),
    "`_max`": (verl_probs()["training/rollout_probs_diff_max"], "prob_diff/max"),
    "`_std`": (verl_probs()["training/rollout_probs_diff_std"], "prob_diff/std"),
    "training/rollout_actor_probs_pearson_corr": (
        verl_probs()["training/rollout_actor_probs_pearson_corr"],
        "prob_diff/pearson",
    ),
    "train/token_mult_prob_error": (nemo("k3")["train/token_mult_prob_error"], "mult_error"),
    "train/gen_kl_error": (nemo("k3")["train/gen_kl_error"], "k3"),
    "with `k1` it is our `k1`": (nemo("k1")["train/gen_kl_error"], "k1"),
    "mismatch_kl/all/mean": (prime_rl_mismatch_kl(), "k3"),
    "sampling/sampling_logp_difference/mean": (trl()["sampling/sampling_logp_difference/mean"], "abs_diff/mean"),
    "sampling/sampling_logp_difference/max": (trl()["sampling/sampling_logp_difference/max"], "abs_diff/max"),
    "sampling/importance_sampling_ratio/min": (trl()["sampling/importance_sampling_ratio/min"], "ratio/min"),
    "`max` | `ratio/min`, `ratio/max`": (trl()["sampling/importance_sampling_ratio/max"], "ratio/max"),
}
"""What docs/rosetta.md says of theirs → (its value by its own definition, our name)."""


@pytest.mark.parametrize("theirs", EQUAL)
def test_their_number_by_their_definition_is_ours(theirs: str) -> None:
    value, ours = EQUAL[theirs]
    assert value != 0
    assert OURS[ours] == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize("theirs", EQUAL)
def test_the_page_names_it_beside_ours(theirs: str) -> None:
    lines = [line for line in ROSETTA.splitlines() if line.startswith("|") and theirs in line]
    ours = EQUAL[theirs][1]
    word = ours.rsplit("/", 1)[-1]
    assert any(f"`{ours}`" in line or f"`{word}`" in line or "the same names" in line for line in lines), lines


def test_every_row_of_the_page_that_names_one_of_ours_is_asserted() -> None:
    rows = [line for line in ROSETTA.splitlines() if line.startswith("| ") and "| none" not in line]
    rows = [row for row in rows if not row.startswith("| theirs")]
    assert len(rows) >= 16
    for row in rows:
        assert any(theirs in row for theirs in EQUAL), row


def test_our_names_on_the_page_exist() -> None:
    cells = [line.split("|")[2] for line in ROSETTA.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([a-z0-9_/]+)`", cell)]
    known = set(OURS) | {name.rsplit("/", 1)[-1] for name in OURS}
    assert names
    assert set(names) <= known, set(names) - known


def test_the_reverse_direction_is_measured_by_swapping_the_sides() -> None:
    swapped = measure(ROLLOUT, TRAIN, MASK).metrics
    assert swapped["k3"] == pytest.approx(nemo("k3")["train/policy_kl_error"], rel=1e-12)
    assert swapped["k3"] != pytest.approx(OURS["k3"], rel=1e-3)


def test_miles_zero_for_a_nan_lowers_its_number_while_ours_fails() -> None:
    train = [values.copy() for values in TRAIN]
    train[3][0] = math.nan  # the worst token of the batch
    d = [np.nan_to_num(np.abs(a - b), nan=0.0, posinf=0.0, neginf=0.0) for a, b in zip(train, ROLLOUT, strict=True)]
    theirs = mean(float(x[m].mean()) for x, m in zip(d, MASK, strict=True))
    assert theirs < miles_abs_diff(per_token=False, owners=["a", "b", "c", "d"], num_rollouts=4)
    assert measure(train, ROLLOUT, MASK).num_nonfinite == 1


def test_a_rollout_without_a_counted_token_dilutes_their_means_and_not_ours() -> None:
    empty = [*TRAIN, np.array([-1.0])], [*ROLLOUT, np.array([-3.0])], [*MASK, np.zeros(1, dtype=bool)]
    ours = measure(*empty, rollout_ids=[*OWNERS, "d"]).metrics
    assert ours == OURS
    assert miles_abs_diff(per_token=False, num_rollouts=4) == pytest.approx(0.75 * ours["abs_diff/rollout_mean"])
    theirs = verl(num_empty=1)
    for name in ("log_ppl_diff", "log_ppl_abs_diff", "chi2_seq"):
        assert theirs[f"rollout_corr/{name}"] == pytest.approx(0.8 * ours[name])


def test_a_rollout_of_two_samples_is_one_in_both_means() -> None:
    by_sample = miles_abs_diff(per_token=False, owners=["a", "b", "c", "d"], num_rollouts=4)
    assert OURS["abs_diff/rollout_mean"] == pytest.approx(miles_abs_diff(per_token=False))
    assert OURS["abs_diff/rollout_mean"] != pytest.approx(by_sample, rel=1e-3)
    assert measure(TRAIN, ROLLOUT, MASK).metrics["abs_diff/rollout_mean"] == pytest.approx(by_sample)


def test_means_of_signed_differences_cancel_where_ours_do_not() -> None:
    """The check on the means of both sides passes though every token is off by a half."""
    train, rollout = [np.array([-1.0, -2.0])], [np.array([-1.5, -1.5])]
    got = measure(train, rollout, [np.ones(2, dtype=bool)]).metrics
    assert got["signed/mean"] == 0.0
    assert got["abs_diff/mean"] == 0.5
