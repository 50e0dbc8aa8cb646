"""What ``Partial``s hold, how they merge, and how numbers come out: pure data, whoever carries it from rank to rank.

::

    rank 0: measure(…).partial ─┐
    rank 1: measure(…).partial ─┼─▶ merge ─▶ finish ─▶ the Agreement of the whole batch
    rank 2: measure(…).partial ─┘

Counts and maxima of the merged whole are exact; means are exact sums over exact counts (never means of means), so they
differ from one measurement of everything by float64 rounding only. Sums are correctly rounded (``math.fsum``) and do
not depend on the order of the parts. Sequences and rollouts with ids may be spread over parts: their tokens are pooled
before anything is taken of them. Quantiles over tokens come from a sketch, within ``agreement_sketch.RELATIVE_ERROR``
of the exact ones; deciles of l_roll come from one too, so a token near an edge may fall into the neighbour.
Quantiles over sequences are exact. Needs torch and numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.agreement_sketch import Counts, merge_counts, quantiles, value_of

CHI2_LIMIT = 20.0
EXP_LIMIT = 600.0
"""Bound of exponents of single metrics: exp(600) is still a finite float64, also when summed."""

NUM_WORST = 16
"""How many of the worst tokens are kept."""

QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
ROUTE_LABELS = ("unknown", "equal", "flipped")

Cell = tuple[int, float, float]
"""Tokens, sum and maximum of their \\|d\\|."""

Group = tuple[int, float, float]
"""Tokens, Σ d and Σ \\|d\\| of one sequence or rollout."""


@dataclass(frozen=True, slots=True)
class TokenPair:
    """One token in context: ``row`` and ``column`` in the caller's layout (row 0 when flat), and both log-probs.

    ``sequence``: the caller's id of the sequence (or else of the rollout), None if there is none. In a merged result
    it is what tells rows of different parts apart.
    """

    row: int
    column: int
    train: float
    rollout: float
    sequence: Any = None

    @property
    def badness(self) -> float:
        """\\|d\\|, or infinity where either side is not finite."""
        finite = math.isfinite(self.train) and math.isfinite(self.rollout)
        return abs(self.train - self.rollout) if finite else math.inf


@dataclass(frozen=True, slots=True)
class Bucket:
    """Finite tokens of one bucket: how many, mean and largest \\|d\\|."""

    num_tokens: int
    abs_diff_mean: float
    abs_diff_max: float


@dataclass(frozen=True, slots=True)
class Moments:
    """Of two series x and y over n values: means, centred sums of squares and of products."""

    n: int = 0
    mean_x: float = 0.0
    mean_y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    @staticmethod
    def merge(parts: Sequence[Moments]) -> Moments:
        """Of all values together (Chan, Golub and LeVeque 1979): no cancellation, unlike raw sums of squares."""
        n = sum(part.n for part in parts)
        if n == 0:
            return Moments()
        x = math.fsum(part.n * part.mean_x for part in parts) / n
        y = math.fsum(part.n * part.mean_y for part in parts) / n

        def centred(own: float, num: int, dx: float, dy: float) -> float:
            return own + num * dx * dy

        return Moments(
            n,
            x,
            y,
            math.fsum(centred(p.xx, p.n, p.mean_x - x, p.mean_x - x) for p in parts),
            math.fsum(centred(p.yy, p.n, p.mean_y - y, p.mean_y - y) for p in parts),
            math.fsum(centred(p.xy, p.n, p.mean_x - x, p.mean_y - y) for p in parts),
        )


@dataclass(frozen=True, slots=True)
class Groups:
    """Sums by sequence or rollout: those with an id of the caller's, which merge by it, and those without."""

    named: Mapping[Any, Group] = field(default_factory=dict)
    unnamed: tuple[Group, ...] = ()

    def all(self) -> list[Group]:
        """Every group that holds at least one token."""
        return [*self.named.values(), *self.unnamed]

    @staticmethod
    def merge(parts: Sequence[Groups]) -> Groups:
        """Groups of one id are pooled."""
        found: dict[Any, list[Group]] = {}
        for part in parts:
            for name, group in part.named.items():
                found.setdefault(name, []).append(group)
        pooled = {
            name: (sum(g[0] for g in gs), math.fsum(g[1] for g in gs), math.fsum(g[2] for g in gs))
            for name, gs in found.items()
        }
        return Groups(pooled, tuple(group for part in parts for group in part.unnamed))


@dataclass(frozen=True, slots=True)
class Partial:
    """The mergeable content of one measurement; ``merge`` adds several up, ``agreement.finish`` makes the numbers.

    ``sums`` and ``largest`` by name over the finite eligible tokens. ``weights``: (largest d, Σ exp(d − it),
    Σ exp(d − it)²). ``probs``: moments of p_train and p_roll; ``gaps``: of their \\|difference\\| (as x).
    ``hits``: (agreeing, known) of top-1 and routes. ``sketch``: bins of \\|d\\|; ``decile``: cells of \\|d\\| by bin of
    −l_roll. ``cells``: buckets by kind and key. None in ``sequences``: it is not known which tokens belong together.
    """

    num_tokens: int = 0
    num_stale: int = 0
    num_nonfinite: int = 0
    num_rejected: int | None = None
    sums: Mapping[str, float] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)
    weights: tuple[float, float, float] | None = None
    probs: Moments = Moments()
    gaps: Moments = Moments()
    hits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sequences: Groups | None = None
    rollouts: Groups | None = None
    sketch: Counts = field(default_factory=dict)
    decile: Mapping[int, Cell] = field(default_factory=dict)
    cells: Mapping[str, Mapping[Any, Cell]] = field(default_factory=dict)
    worst: tuple[TokenPair, ...] = ()


def merge(parts: Iterable[Partial]) -> Partial:
    """All tokens of the parts as one. The order of the parts matters for ties among the worst tokens only.

    Metrics by sequence need every part with tokens to know its sequences; ``num_rejected`` needs all parts to know it.
    """
    parts = [part for part in parts if part.num_tokens or part.num_stale or part.num_nonfinite]
    measured = [part for part in parts if part.num_tokens]
    rejected = [part.num_rejected for part in parts]
    weights = [part.weights for part in measured if part.weights is not None]
    kinds = dict.fromkeys(kind for part in parts for kind in part.cells)
    sequences = [part.sequences for part in measured if part.sequences is not None]
    rollouts = [part.rollouts for part in measured if part.rollouts is not None]
    return Partial(
        num_tokens=sum(part.num_tokens for part in parts),
        num_stale=sum(part.num_stale for part in parts),
        num_nonfinite=sum(part.num_nonfinite for part in parts),
        num_rejected=sum(r for r in rejected if r is not None) if rejected and None not in rejected else None,
        sums={name: math.fsum(p.sums[name] for p in measured) for name in (measured[0].sums if measured else ())},
        largest={name: max(p.largest[name] for p in measured) for name in (measured[0].largest if measured else ())},
        weights=_merge_weights(weights),
        probs=Moments.merge([part.probs for part in measured]),
        gaps=Moments.merge([part.gaps for part in measured]),
        hits=_merge_hits([part.hits for part in parts]),
        sequences=Groups.merge(sequences) if measured and len(sequences) == len(measured) else None,
        rollouts=Groups.merge(rollouts) if measured and len(rollouts) == len(measured) else None,
        sketch=merge_counts(part.sketch for part in parts),
        decile=merge_cells([part.decile for part in parts]),
        cells={kind: merge_cells([part.cells.get(kind, {}) for part in parts]) for kind in kinds},
        worst=worst_first(token for part in parts for token in part.worst),
    )


def worst_first(tokens: Iterable[TokenPair]) -> tuple[TokenPair, ...]:
    """The ``NUM_WORST`` worst ones: those that are not finite in their order, then by \\|d\\|."""
    return tuple(sorted(tokens, key=lambda token: -token.badness)[:NUM_WORST])


def merge_cells(parts: Sequence[Mapping[Any, Cell]]) -> dict[Any, Cell]:
    """Cells of one key are added up."""
    found: dict[Any, list[Cell]] = {}
    for part in parts:
        for key, cell in part.items():
            found.setdefault(key, []).append(cell)
    return {key: (sum(c[0] for c in cs), math.fsum(c[1] for c in cs), max(c[2] for c in cs))
            for key, cs in found.items()}  # fmt: skip


def _merge_weights(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    if not parts:
        return None
    top = max(shift for shift, _, _ in parts)
    once = math.fsum(total * math.exp(shift - top) for shift, total, _ in parts)
    return top, once, math.fsum(squares * math.exp(2 * (shift - top)) for shift, _, squares in parts)


def _merge_hits(parts: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    names = dict.fromkeys(name for part in parts for name in part)
    found = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: (sum(hit for hit, _ in pairs), sum(known for _, known in pairs)) for name, pairs in found.items()}


# --- the numbers ---


def metrics_of(part: Partial) -> dict[str, float]:
    """Every metric that the content permits; quantiles over tokens are the sketch's."""
    n = part.num_tokens
    metrics = {name: hit / known for name, (hit, known) in part.hits.items() if known}
    if n == 0:
        return metrics
    mean = {name: total / n for name, total in part.sums.items()}
    found = quantiles(part.sketch, list(QUANTILES.values()))
    top = part.largest["abs_diff"]
    metrics |= {f"abs_diff/{name}": min(value, top) for name, value in zip(QUANTILES, found, strict=True)}
    _, once, squares = part.weights or (0.0, float(n), float(n))
    metrics |= {
        "abs_diff/mean": mean["abs_diff"],
        "abs_diff/max": top,
        "signed/mean": mean["d"],
        "k1": -mean["d"],
        "k3": mean["k3"],
        "ratio/min": _exp(-part.largest["-d"]),
        "ratio/max": _exp(part.largest["d"]),
        "ess": once**2 / (n * squares),
        "mult_error": mean["mult_error"],
        "chi2_token": mean["chi2"] - 1,
        "prob_diff/mean": mean["prob_diff"],
        "prob_diff/max": part.largest["prob_diff"],
    }
    return metrics | _spread(part) | _by_sequence(part)


def _spread(part: Partial) -> dict[str, float]:
    if part.num_tokens < 2:
        return {}
    result = {"prob_diff/std": math.sqrt(max(part.gaps.xx, 0.0) / (part.num_tokens - 1))}
    norm = math.sqrt(part.probs.xx) * math.sqrt(part.probs.yy)
    constant = any(part.largest[name] == -part.largest[f"-{name}"] for name in ("p", "q"))
    if norm > 0 and not constant:
        result["prob_diff/pearson"] = part.probs.xy / norm
    return result


def _by_sequence(part: Partial) -> dict[str, float]:
    if part.sequences is None or part.rollouts is None:
        return {}
    own = [absolute / n for n, _, absolute in part.rollouts.all()]
    groups = part.sequences.all()
    sums = np.array([signed for _, signed, _ in groups])
    means = [signed / n for n, signed, _ in groups]
    middle, high = np.quantile(np.abs(sums), [QUANTILES["p50"], QUANTILES["p99"]])
    chi2 = np.exp(2 * np.clip(sums, -CHI2_LIMIT, CHI2_LIMIT))
    return {
        "abs_diff/rollout_mean": math.fsum(own) / len(own),
        "seq_sum/p50": float(middle),
        "seq_sum/p99": float(high),
        "seq_sum/max": float(np.abs(sums).max()),
        "log_ppl_diff": -math.fsum(means) / len(means),
        "log_ppl_abs_diff": math.fsum(abs(m) for m in means) / len(means),
        "chi2_seq": math.fsum(chi2) / len(chi2) - 1,
    }


def _exp(value: float) -> float:
    return math.exp(max(-EXP_LIMIT, min(EXP_LIMIT, value)))


def buckets_of(part: Partial) -> dict[str, dict[str, Bucket]]:
    """Buckets by kind and label, in a readable order."""
    cells: dict[str, Mapping[str, Cell]] = {}
    for kind, by_key in part.cells.items():
        keys = sorted(by_key) if all(isinstance(key, int) for key in by_key) else list(by_key)
        label = {"position": position_label, "routes": lambda key: ROUTE_LABELS[key]}.get(kind, str)
        cells[kind] = {label(key): by_key[key] for key in keys}
    if part.decile:
        cells["decile"] = _deciles(part.decile)
    order = [kind for kind in ("position", "decile", "routes", "replica", "version") if kind in cells]
    return {kind: {label: bucket_of(cell) for label, cell in cells[kind].items()} for kind in order}


def bucket_of(cell: Cell) -> Bucket:
    """A cell as the reader sees it."""
    num, total, most = cell
    return Bucket(num, total / num, most)


def position_label(bits: int) -> str:
    """Label of the positions that take ``bits`` bits: 0, 1, 2-3, 4-7, …"""
    return str(bits) if bits < 2 else f"{2 ** (bits - 1)}-{2**bits - 1}"


def _deciles(by_bin: Mapping[int, Cell]) -> dict[str, Cell]:
    """Cells by decile of l_roll from cells by bin of −l_roll: the same edges and rule as for exact values."""
    counts = {index: cell[0] for index, cell in by_bin.items()}
    edges = quantiles(counts, [1 - tenth / 10 for tenth in range(1, 10)])  # falling −l_roll is rising l_roll
    found: dict[int, list[Cell]] = {}
    for index, cell in by_bin.items():
        value = value_of(index)
        found.setdefault(sum(value < edge for edge in edges), []).append(cell)
    return {str(decile): merge_cells([{0: cell} for cell in cells])[0] for decile, cells in sorted(found.items())}
