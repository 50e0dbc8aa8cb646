"""How far apart the trainer's and the rollout engine's log-probs of the same sampled tokens are.

Needs only torch and numpy, so that it can be imported into any trainer. One call, no model, no state::

    agreement = measure(train_logprobs, rollout_logprobs, mask)        # each [N], [B, T], or a list of [T_i]
    agreement.metrics["abs_diff/mean"], agreement.num_nonfinite, agreement.worst

d_t = l_train − l_roll over *eligible* tokens: mask 1, and sampled and cached at exactly the trainer's version where
versions are given; other masked tokens are ``stale`` and counted apart. The mask is the one from before any correction
or rejection. Both sides must be log-probs of the sampling distribution (logits over temperature). Non-finite values are
counted and never replaced. A metric that is undefined for the input is absent: never 0, never NaN. Sums are float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

PerToken = Tensor | np.ndarray | Seq[Tensor] | Seq[np.ndarray]
"""Per-token values: flat [N], padded [B, T], or a list of B arrays [T_i]. All arguments of a call share one layout."""

CHI2_LIMIT = 20.0
EXP_LIMIT = 600.0
"""Bound of exponents of single metrics: exp(600) is still a finite float64, also when summed."""


@dataclass(frozen=True, slots=True)
class TokenPair:
    """One token in context: ``row`` and ``column`` in the caller's layout (row 0 when flat), and both log-probs."""

    row: int
    column: int
    train: float
    rollout: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Finite tokens of one bucket: how many, mean and largest \\|d\\|."""

    num_tokens: int
    abs_diff_mean: float
    abs_diff_max: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """All numbers of one measurement.

    ``metrics``: by name, over the ``num_tokens`` eligible finite tokens. ``num_nonfinite`` counts masked tokens, stale
    ones included, where either side is NaN or ±Inf. ``num_rejected`` (None: not told) is for the reader; rejected
    tokens are measured all the same. ``worst``: the first non-finite token if there is one, else the one with the
    largest \\|d\\|. ``buckets``: {"position" | "decile" | "replica" | "version" | "routes": {label: Bucket}}; only
    "version" includes stale tokens.
    """

    metrics: dict[str, float]
    num_tokens: int
    num_stale: int
    num_nonfinite: int
    num_rejected: int | None
    worst: TokenPair | None
    buckets: dict[str, dict[str, Bucket]]

    @property
    def unjudged(self) -> bool:
        """Not a single eligible token and nothing non-finite: nothing was measured, which is not a pass."""
        return self.num_tokens == 0 and self.num_nonfinite == 0

    def flat(self, prefix: str = "agreement/") -> dict[str, float]:
        """Metrics and counts under one prefix, for a step log. Buckets are left to reports."""
        counts = {"tokens": self.num_tokens, "stale": self.num_stale, "nonfinite": self.num_nonfinite}
        if self.num_rejected is not None:
            counts["rejected"] = self.num_rejected
        counts["unjudged"] = int(self.unjudged)
        return {prefix + k: float(v) for k, v in (self.metrics | counts).items()}


def measure(
    train_logprobs: PerToken,
    rollout_logprobs: PerToken,
    mask: PerToken,
    *,
    sequence_ids: Seq[Any] | Tensor | np.ndarray | None = None,
    rollout_ids: Seq[Any] | Tensor | np.ndarray | None = None,
    replicas: Seq[Any] | Tensor | np.ndarray | None = None,
    versions: PerToken | None = None,
    kv_versions: PerToken | None = None,
    version: int | None = None,
    positions: PerToken | None = None,
    train_top1: PerToken | None = None,
    rollout_top1: PerToken | None = None,
    train_routes: PerToken | None = None,
    rollout_routes: PerToken | None = None,
    rejected: PerToken | None = None,
) -> Agreement:
    """Every agreement metric that the input permits, in one pass.

    ``sequence_ids``, ``rollout_ids`` and ``replicas`` have one entry per row ([B, T] or list) or per token (flat). A
    row is a sequence; without ``rollout_ids`` a rollout is one; flat input without ids has no metrics by sequence.
    ``versions`` and ``kv_versions`` are compared with ``version``, the trainer's. ``positions``: place in the response,
    by default the rank among the row's masked tokens. ``train_top1`` and ``rollout_top1`` hold argmax ids (−1: not
    known). Routes are [·, L, K] expert ids (−1: not known) of the forward that *produced* the token's log-prob, that
    is, of the position before it. ``rejected``: masked tokens that a correction dropped, only counted.

    Raises ValueError for arguments of different layouts, versions without ``version``, or one half of a pair.
    """
    layout = _Layout.of(train_logprobs)
    train = layout.flat("train_logprobs", train_logprobs).double()
    rollout = layout.flat("rollout_logprobs", rollout_logprobs).double()
    masked = layout.flat("mask", mask).bool()
    sampled_at = None if versions is None else layout.flat("versions", versions)
    cached_at = None if kv_versions is None else layout.flat("kv_versions", kv_versions)
    eligible = masked & _fresh(sampled_at, cached_at, version)
    finite = torch.isfinite(train) & torch.isfinite(rollout)
    used = torch.nonzero(eligible & finite).flatten()
    d = (train - rollout)[used]

    sequence, group = layout.owners(sequence_ids, rollout_ids)
    metrics = _token_metrics(d) | _probability_metrics(train[used], rollout[used])
    if sequence is not None and group is not None:
        metrics |= _sequence_metrics(d, sequence[used], group[used])
    metrics |= _argmax_agreement(layout.pair("top1", train_top1, rollout_top1), used)
    shares, flipped = _route_agreement(layout.pair("routes", train_routes, rollout_routes), used)
    metrics |= shares

    places = layout.flat("positions", positions).long() if positions is not None else layout.positions(masked, sequence)
    buckets = _buckets(d.abs(), rollout[used], None if places is None else places[used], flipped)
    if replicas is not None:
        codes, names = layout.codes("replicas", replicas)
        buckets["replica"] = _bucketed(codes[used], names, d.abs())
    if sampled_at is not None:
        every = torch.nonzero(masked & finite).flatten()
        values, codes = torch.unique(sampled_at[every], return_inverse=True)
        buckets["version"] = _bucketed(codes, values.tolist(), (train - rollout)[every].abs())
    return Agreement(
        metrics=metrics,
        num_tokens=len(used),
        num_stale=int((masked & ~eligible).sum()),
        num_nonfinite=int((masked & ~finite).sum()),
        num_rejected=None if rejected is None else int((layout.flat("rejected", rejected).bool() & masked).sum()),
        worst=_worst(train, rollout, masked & ~finite, used, layout),
        buckets=buckets,
    )


def self_difference(first: PerToken, second: PerToken, mask: PerToken) -> dict[str, float]:
    """The trainer against itself: two passes over the same tokens, packed differently.

    ``self/max``: the largest \\|difference\\| (absent without a finite token); ``self/nonfinite``: tokens that are not
    finite on either side.
    """
    own = measure(first, second, mask)
    result = {"self/nonfinite": float(own.num_nonfinite)}
    if "abs_diff/max" in own.metrics:
        result["self/max"] = own.metrics["abs_diff/max"]
    return result


def _fresh(sampled_at: Tensor | None, cached_at: Tensor | None, version: int | None) -> Tensor | bool:
    """Which tokens were sampled and cached at exactly ``version``; all of them if no version is known."""
    known = [v for v in (sampled_at, cached_at) if v is not None]
    if known and version is None:
        raise ValueError("versions were given without `version`, the trainer's own: staleness can't be decided")
    fresh: Tensor | bool = True
    for value in known:
        fresh = fresh & (value == version)
    return fresh


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of a call's per-token arguments, and how they become flat tensors on the device of the first."""

    lengths: tuple[int, ...]  # tokens per row; one entry when flat
    has_rows: bool
    row: Tensor  # [N]
    device: torch.device

    @classmethod
    def of(cls, values: PerToken) -> _Layout:
        first = _tensor(values[0] if isinstance(values, (list, tuple)) and values else values)
        if isinstance(values, (list, tuple)):
            lengths, has_rows = tuple(len(v) for v in values), True
        elif first.dim() == 2:
            lengths, has_rows = (first.shape[1],) * first.shape[0], True
        elif first.dim() == 1:
            lengths, has_rows = (first.shape[0],), False
        else:
            raise ValueError(f"log-probs must be [N], [B, T] or a list of [T_i], not of shape {tuple(first.shape)}")
        counts = torch.tensor(lengths, dtype=torch.long, device=first.device)
        row = torch.repeat_interleave(torch.arange(len(lengths), device=first.device), counts)
        return cls(lengths, has_rows, row, first.device)

    def flat(self, name: str, values: PerToken) -> Tensor:
        """[N, …]; trailing dimensions (routes) are kept."""
        if isinstance(values, (list, tuple)):
            lengths = tuple(len(v) for v in values)
            tensor = torch.cat([_tensor(v) for v in values]) if values else torch.zeros(0)
        else:
            tensor = _tensor(values)
            if self.has_rows and tensor.dim() >= 2:
                lengths, tensor = (tensor.shape[1],) * tensor.shape[0], tensor.flatten(0, 1)
            else:
                lengths = (tensor.shape[0],)
        if lengths != self.lengths:
            raise ValueError(f"{name} has rows of {lengths} tokens, the trainer's log-probs of {self.lengths}")
        return tensor.detach().to(self.device)

    def codes(self, name: str, values: Seq[Any] | Tensor | np.ndarray) -> tuple[Tensor, list[Any]]:
        """(small integers [N], label of each) from one label per row or, when flat, one per token."""
        plain = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
        expected = len(self.lengths) if self.has_rows else self.lengths[0]
        if len(plain) != expected:
            raise ValueError(f"{name} has {len(plain)} entries; needed: {expected}, one per row (or per token if flat)")
        seen: dict[Any, int] = {}
        codes = torch.tensor([seen.setdefault(v, len(seen)) for v in plain], dtype=torch.long, device=self.device)
        return codes[self.row] if self.has_rows else codes, list(seen)

    def owners(self, sequence_ids: Any, rollout_ids: Any) -> tuple[Tensor | None, Tensor | None]:
        """(sequence, rollout) of each token as codes [N]; each stands in for the other where only one is known."""
        rollout = None if rollout_ids is None else self.codes("rollout_ids", rollout_ids)[0]
        if sequence_ids is not None:
            sequence = self.codes("sequence_ids", sequence_ids)[0]
        else:
            sequence = self.row if self.has_rows else rollout
        return sequence, sequence if rollout is None else rollout

    def pair(self, name: str, train: PerToken | None, rollout: PerToken | None) -> tuple[Tensor, Tensor] | None:
        if (train is None) != (rollout is None):
            raise ValueError(f"train_{name} and rollout_{name} belong together; only one was given")
        if train is None or rollout is None:
            return None
        return self.flat(f"train_{name}", train), self.flat(f"rollout_{name}", rollout)

    def positions(self, masked: Tensor, sequence: Tensor | None) -> Tensor | None:
        """Rank of each masked token in its sequence; None if sequences are unknown."""
        if sequence is None:
            return None
        order = torch.argsort(sequence, stable=True)
        ranks = torch.cumsum(masked[order].long(), 0) - masked[order].long()
        starts = torch.full((int(sequence.max()) + 1 if len(sequence) else 0,), len(sequence), device=self.device)
        starts = starts.scatter_reduce(0, sequence[order], torch.arange(len(order), device=self.device), "amin")
        result = torch.empty_like(ranks)
        result[order] = ranks - ranks[starts[sequence[order]]]
        return result


def _tensor(values: Any) -> Tensor:
    return (
        values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    )  # a copy: inputs may be read-only


def _quantile(ordered: Tensor, q: float) -> float:
    """Linear interpolation between order statistics, as numpy's default (torch.quantile stops at 16M values)."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def _exp(values: Tensor) -> Tensor:
    return torch.exp(values.clamp(-EXP_LIMIT, EXP_LIMIT))


def _token_metrics(d: Tensor) -> dict[str, float]:
    if len(d) == 0:
        return {}
    absolute = d.abs()
    ordered = torch.sort(absolute).values
    ratio = _exp(d)
    scaled = torch.exp(d - d.max())  # ess does not change when all weights are scaled, and this can't overflow
    values = {
        "abs_diff/mean": absolute.mean(),
        "abs_diff/p50": _quantile(ordered, 0.5),
        "abs_diff/p99": _quantile(ordered, 0.99),
        "abs_diff/p999": _quantile(ordered, 0.999),
        "abs_diff/max": ordered[-1],
        "signed/mean": d.mean(),
        "k1": -d.mean(),
        "k3": (torch.expm1(d.clamp(-EXP_LIMIT, EXP_LIMIT)) - d).mean(),
        "ratio/min": ratio.min(),
        "ratio/max": ratio.max(),
        "ess": scaled.sum() ** 2 / (len(d) * (scaled**2).sum()),
        "mult_error": _exp(absolute).mean(),
        "chi2_token": torch.exp(2 * d.clamp(-CHI2_LIMIT, CHI2_LIMIT)).mean() - 1,
    }
    return {name: float(value) for name, value in values.items()}


def _probability_metrics(l_train: Tensor, l_roll: Tensor) -> dict[str, float]:
    if len(l_train) == 0:
        return {}
    p, q = _exp(l_train), _exp(l_roll)
    difference = (p - q).abs()
    result = {"prob_diff/mean": float(difference.mean()), "prob_diff/max": float(difference.max())}
    if len(p) > 1:
        result["prob_diff/std"] = float(difference.std())
        a, b = p - p.mean(), q - q.mean()
        norm = float(a.norm() * b.norm())
        if norm > 0 and not (torch.all(p == p[0]) or torch.all(q == q[0])):
            result["prob_diff/pearson"] = float((a * b).sum()) / norm
    return result


def _segment_means(values: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """(sums, means) of the segments that hold at least one value."""
    size = int(codes.max()) + 1
    sums = torch.zeros(size, dtype=torch.float64, device=values.device).index_add_(0, codes, values)
    counts = torch.bincount(codes, minlength=size)
    present = counts > 0
    return sums[present], sums[present] / counts[present]


def _sequence_metrics(d: Tensor, sequence: Tensor, rollout: Tensor) -> dict[str, float]:
    if len(d) == 0:
        return {}
    sums, means = _segment_means(d, sequence)
    ordered = torch.sort(sums.abs()).values
    return {
        "abs_diff/rollout_mean": float(_segment_means(d.abs(), rollout)[1].mean()),
        "seq_sum/p50": _quantile(ordered, 0.5),
        "seq_sum/p99": _quantile(ordered, 0.99),
        "seq_sum/max": float(ordered[-1]),
        "log_ppl_diff": float(-means.mean()),
        "log_ppl_abs_diff": float(means.abs().mean()),
        "chi2_seq": float(torch.exp(2 * sums.clamp(-CHI2_LIMIT, CHI2_LIMIT)).mean()) - 1,
    }


def _share(name: str, hits: Tensor) -> dict[str, float]:
    return {name: float(hits.double().mean())} if hits.numel() else {}


def _argmax_agreement(pair: tuple[Tensor, Tensor] | None, used: Tensor) -> dict[str, float]:
    if pair is None:
        return {}
    a, b = pair[0][used], pair[1][used]
    return _share("argmax_agree", (a == b)[(a >= 0) & (b >= 0)])


def _route_agreement(pair: tuple[Tensor, Tensor] | None, used: Tensor) -> tuple[dict[str, float], Tensor | None]:
    """The share of (token, layer) with equal expert *sets*, and per token [M] 1: some layer differs, 0: none, −1:
    unknown; from ids [N, L, K]."""
    if pair is None:
        return {}, None
    a, b = pair[0][used], pair[1][used]
    known = ((a >= 0) & (b >= 0)).all(-1)
    equal = (torch.sort(a, -1).values == torch.sort(b, -1).values).all(-1)
    return _share("route_agree", equal[known]), torch.where(known.any(1), (known & ~equal).any(1).long(), -1)


def _buckets(
    absolute: Tensor, l_roll: Tensor, places: Tensor | None, flipped: Tensor | None
) -> dict[str, dict[str, Bucket]]:
    buckets: dict[str, dict[str, Bucket]] = {}
    if len(absolute) == 0:
        return buckets
    if places is not None:  # 0, 1, 2-3, 4-7, …: the exponent of frexp is the number of bits, exactly
        bits = torch.frexp(places.double()).exponent.long()
        names = ["0", "1", *(f"{2 ** (e - 1)}-{2**e - 1}" for e in range(2, int(bits.max()) + 1))]
        buckets["position"] = _bucketed(bits, names, absolute)
    ordered = torch.sort(l_roll).values
    edges = torch.tensor([_quantile(ordered, i / 10) for i in range(1, 10)], dtype=torch.float64)
    decile = torch.searchsorted(edges.to(l_roll.device), l_roll)  # 0: the least likely tokens
    buckets["decile"] = _bucketed(decile, range(10), absolute)
    if flipped is not None:
        buckets["routes"] = _bucketed(flipped + 1, ("unknown", "equal", "flipped"), absolute)
    return buckets


def _bucketed(codes: Tensor, names: Seq[Any], absolute: Tensor) -> dict[str, Bucket]:
    """Buckets of \\|d\\| [M] by code [M]; empty ones are left out."""
    zeros = torch.zeros(len(names), dtype=torch.float64, device=absolute.device)
    counts = torch.bincount(codes, minlength=len(names)).tolist()
    sums = zeros.index_add(0, codes, absolute).tolist()
    largest = zeros.scatter_reduce(0, codes, absolute, "amax").tolist()
    return {
        str(name): Bucket(count, total / count, most)
        for name, count, total, most in zip(names, counts, sums, largest, strict=True)
        if count
    }


def _worst(train: Tensor, rollout: Tensor, broken: Tensor, used: Tensor, layout: _Layout) -> TokenPair | None:
    if bool(broken.any()):
        index = int(torch.nonzero(broken)[0])
    elif len(used):
        index = int(used[torch.argmax((train - rollout)[used].abs())])
    else:
        return None
    row = int(layout.row[index])
    return TokenPair(row, index - sum(layout.lengths[:row]), float(train[index]), float(rollout[index]))
