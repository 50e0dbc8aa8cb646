"""How far apart the trainer's and the rollout engine's log-probs of the same sampled tokens are.

Needs only torch and numpy, so that it can be imported into any trainer. One call, no model, no state::

    agreement = measure(train_logprobs, rollout_logprobs, mask)        # each [N], [B, T], or a list of [T_i]
    agreement.metrics["abs_diff/mean"], agreement.num_nonfinite, agreement.worst

    finish(merge([agreement.partial for …]))                           # of several micro-batches, replicas or steps
    finish(merge_ranks(agreement.partial))                             # of all ranks of torch.distributed

d_t = l_train − l_roll over *eligible* tokens: mask 1, and sampled and cached at exactly the trainer's version where
versions are given; other masked tokens are ``stale`` and counted apart. The mask is the one from before any correction
or rejection. Both sides must be log-probs of the sampling distribution (logits over temperature). Non-finite values are
counted and never replaced. A metric that is undefined for the input is absent: never 0, never NaN. Sums are float64.

``agreement_partial`` has what merges and the definitions, ``agreement_sketch`` mergeable quantiles,
``agreement_layout`` the layouts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.agreement_layout import Labels, Layout, Owners, PerToken, ranks
from lockstep.agreement_partial import (
    CHI2_LIMIT,
    EXP_LIMIT,
    NUM_WORST,
    QUANTILES,
    Bucket,
    Cell,
    Groups,
    Moments,
    Partial,
    TokenPair,
    bucket_of,
    buckets_of,
    merge,
    metrics_of,
    worst_first,
)
from lockstep.agreement_sketch import bins_of, counts_of

__all__ = [
    "Agreement", "Bucket", "Partial", "PerToken", "TokenPair", "finish", "measure", "merge", "merge_ranks",
    "self_difference",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Agreement:
    """All numbers of one measurement.

    ``metrics``: by name, over the ``num_tokens`` eligible finite tokens. ``num_nonfinite`` counts masked tokens, stale
    ones included, where either side is NaN or ±Inf. ``num_rejected`` (None: not told) is for the reader; rejected
    tokens are measured all the same. ``worst``: the first non-finite token if there is one, else the one with the
    largest \\|d\\|; ``worst_tokens``: it and up to 15 more in that order. ``buckets``: {"position" | "decile" |
    "replica" | "version" | "routes": {label: Bucket}}; only "version" includes stale tokens. ``partial``: the same in
    a form that merges.
    """

    metrics: dict[str, float]
    num_tokens: int
    num_stale: int
    num_nonfinite: int
    num_rejected: int | None
    worst: TokenPair | None
    buckets: dict[str, dict[str, Bucket]]
    worst_tokens: tuple[TokenPair, ...] = ()
    partial: Partial = field(default_factory=Partial, repr=False, compare=False)

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
    sequence_ids: Labels | None = None,
    rollout_ids: Labels | None = None,
    replicas: Labels | None = None,
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
    When partials are merged, equal ids mean the same sequence or rollout. ``versions`` and ``kv_versions`` are compared
    with ``version``, the trainer's. ``positions``: place in the response, by default the rank among the row's masked
    tokens. ``train_top1`` and ``rollout_top1`` hold argmax ids (−1: not known). Routes are [·, L, K] expert ids (not
    known: −1, or the largest value of an unsigned type) of the forward that *produced* the token's log-prob, that is,
    of the position before it. ``rejected``: masked tokens that a correction dropped, only counted.

    Raises ValueError for arguments of different layouts, values that are no numbers, a mask of others than 0 and 1,
    versions without ``version`` or the reverse, one half of a pair, or a masked token at a position below 0.
    """
    layout = Layout.of(train_logprobs)
    train = layout.flat("train_logprobs", train_logprobs).double()
    rollout = layout.flat("rollout_logprobs", rollout_logprobs).double()
    masked = layout.mask("mask", mask)
    sampled_at = None if versions is None else layout.flat("versions", versions)
    cached_at = None if kv_versions is None else layout.flat("kv_versions", kv_versions)
    eligible = masked & _fresh(sampled_at, cached_at, version)
    finite = torch.isfinite(train) & torch.isfinite(rollout)
    used = torch.nonzero(eligible & finite).flatten()
    d = (train - rollout)[used]
    absolute = d.abs()

    hits = _argmax_hits(layout.pair("top1", train_top1, rollout_top1), used)
    route_hits, flipped = _route_hits(layout.pair("routes", train_routes, rollout_routes, trailing=2), used)
    sequence, group = layout.owners(sequence_ids, rollout_ids)
    in_order = ranks(masked, None if sequence is None else sequence.codes)
    places = in_order if positions is None else _positions(layout.flat("positions", positions), masked)
    cells = _place_cells(absolute, None if places is None else places[used], flipped)
    if replicas is not None:
        codes, names = layout.codes("replicas", replicas)
        cells["replica"] = _cells(codes[used], names, absolute)
    if sampled_at is not None:
        every = torch.nonzero(masked & finite).flatten()
        values, codes = torch.unique(sampled_at[every], return_inverse=True)
        cells["version"] = _cells(codes, values.tolist(), (train - rollout)[every].abs())
    part = Partial(
        num_tokens=len(used),
        num_stale=int((masked & ~eligible).sum()),
        num_nonfinite=int((masked & ~finite).sum()),
        num_rejected=None if rejected is None else int((layout.mask("rejected", rejected) & masked).sum()),
        hits=hits | route_hits,
        sequences=None if sequence is None else _groups(sequence, d, used),
        rollouts=None if group is None else _groups(group, d, used),
        cells=cells,
        worst=_worst(train, rollout, masked & ~finite, used, layout, sequence),
    )
    return _exactly(_with_token_sums(part, d, train[used], rollout[used]), absolute, rollout[used])


def finish(part: Partial) -> Agreement:
    """The numbers of a (merged) partial; quantiles over tokens and deciles are the sketch's."""
    return Agreement(
        metrics=metrics_of(part),
        num_tokens=part.num_tokens,
        num_stale=part.num_stale,
        num_nonfinite=part.num_nonfinite,
        num_rejected=part.num_rejected,
        worst=part.worst[0] if part.worst else None,
        buckets=buckets_of(part),
        worst_tokens=part.worst,
        partial=part,
    )


def merge_ranks(part: Partial, group: Any = None) -> Partial:
    """The merged partial of all ranks of a torch.distributed ``group`` (None: all), the same on each; a collective, so
    every rank must call it, also one without tokens. Without an initialised process group it is ``part`` itself."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return part
    parts: list[Partial | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(parts, part, group)
    return merge(found for found in parts if found is not None)


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


def _positions(places: Tensor, masked: Tensor) -> Tensor:
    """Places [N] in the response, none below 0 where ``masked``: such a token would be told as one of another place."""
    lowest = int(places[masked].min()) if bool(masked.any()) else 0
    if lowest < 0:
        raise ValueError(f"positions holds {lowest} for a token whose mask is 1; places in the response begin at 0")
    return places.long()


def _fresh(sampled_at: Tensor | None, cached_at: Tensor | None, version: int | None) -> Tensor | bool:
    """Which tokens were sampled and cached at exactly ``version``; all of them if no version is known."""
    known = [v for v in (sampled_at, cached_at) if v is not None]
    if known and version is None:
        raise ValueError("versions were given without `version`, the trainer's own: staleness can't be decided")
    if not known and version is not None:
        raise ValueError("`version` was given without versions or kv_versions of the tokens: none could be stale")
    if version is not None and np.ndim(version):
        raise ValueError(f"version is the trainer's own, one number, not {version}")
    fresh: Tensor | bool = True
    for value in known:
        fresh = fresh & (value == version)
    return fresh


def _with_token_sums(part: Partial, d: Tensor, l_train: Tensor, l_roll: Tensor) -> Partial:
    """``part`` with everything that is a sum, a maximum or a count over single tokens [M]."""
    if len(d) == 0:
        return part
    absolute = d.abs()
    bounded = d.clamp(-EXP_LIMIT, EXP_LIMIT)
    top = d.max()
    scaled = torch.exp(d - top)  # ess does not change when all weights are scaled, and this can't overflow
    p, q = (torch.exp(side.clamp(-EXP_LIMIT, EXP_LIMIT)) for side in (l_train, l_roll))
    gap = (p - q).abs()
    sums = {
        "abs_diff": absolute,
        "d": d,
        "k3": torch.expm1(bounded) - d,
        "mult_error": torch.exp(bounded.abs()),
        "chi2": torch.exp(2 * d.clamp(-CHI2_LIMIT, CHI2_LIMIT)),
        "prob_diff": gap,
    }
    largest = {"abs_diff": absolute, "d": d, "-d": -d, "prob_diff": gap, "p": p, "-p": -p, "q": q, "-q": -q}
    bins, codes = torch.unique(bins_of(-l_roll), return_inverse=True)
    return replace(
        part,
        sums={name: float(values.sum()) for name, values in sums.items()},
        largest={name: float(values.max()) for name, values in largest.items()},
        weights=(float(top), float(scaled.sum()), float((scaled**2).sum())),
        probs=_moments(p, q),
        gaps=_moments(gap, gap),
        sketch=counts_of(absolute),
        decile=_cells(codes, bins.tolist(), absolute),
    )


def _moments(x: Tensor, y: Tensor) -> Moments:
    a, b = x - x.mean(), y - y.mean()
    return Moments(len(x), float(x.mean()), float(y.mean()), float((a * a).sum()), float((b * b).sum()),
                   float((a * b).sum()))  # fmt: skip


def _exactly(part: Partial, absolute: Tensor, l_roll: Tensor) -> Agreement:
    """``finish`` with exact quantiles and deciles: here all tokens are at hand."""
    rough = finish(part)
    if len(absolute) == 0:
        return rough
    ordered = torch.sort(absolute).values
    metrics = rough.metrics | {f"abs_diff/{name}": _quantile(ordered, share) for name, share in QUANTILES.items()}
    likely = torch.sort(l_roll).values
    edges = [_quantile(likely, tenth / 10) for tenth in range(1, 10)]
    decile = torch.searchsorted(torch.tensor(edges, dtype=torch.float64, device=l_roll.device), l_roll)
    cells = _cells(decile, list(range(10)), absolute)  # 0: the least likely tokens
    return replace(
        rough,
        metrics=metrics,
        buckets=rough.buckets | {"decile": {str(key): bucket_of(cell) for key, cell in cells.items()}},
    )


def _quantile(ordered: Tensor, q: float) -> float:
    """Linear interpolation between order statistics, as numpy's default (torch.quantile stops at 16M values)."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def _groups(owners: Owners, d: Tensor, used: Tensor) -> Groups:
    """Counts and sums by owner; owners without a token are left out."""
    codes = owners.codes[used]
    zeros = torch.zeros(len(owners.names), dtype=torch.float64, device=d.device)
    counts = torch.bincount(codes, minlength=len(zeros)).tolist()
    sums, sizes = zeros.index_add(0, codes, d).tolist(), zeros.index_add(0, codes, d.abs()).tolist()
    rows = list(zip(owners.names, counts, sums, sizes, strict=True))
    if not owners.named:
        return Groups(unnamed=tuple((n, total, size) for _, n, total, size in rows if n))
    return Groups({name: (n, total, size) for name, n, total, size in rows if n})


def _argmax_hits(pair: tuple[Tensor, Tensor] | None, used: Tensor) -> dict[str, tuple[int, int]]:
    if pair is None:
        return {}
    a, b = pair[0][used].long(), pair[1][used].long()
    known = (a >= 0) & (b >= 0)
    return {"argmax_agree": (int(((a == b) & known).sum()), int(known.sum()))}


def _route_hits(pair: tuple[Tensor, Tensor] | None, used: Tensor) -> tuple[dict[str, tuple[int, int]], Tensor | None]:
    """Over (token, layer) with equal expert *sets*, and per token [M] the index in ``ROUTE_LABELS``: 2: some layer
    differs, 1: none, 0: not known; from ids [N, L, K]."""
    if pair is None:
        return {}, None
    a, b = (_signed(side)[used] for side in pair)
    known = ((a >= 0) & (b >= 0)).all(-1)
    equal = (torch.sort(a, -1).values == torch.sort(b, -1).values).all(-1)
    flipped = torch.where(known.any(1), 1 + (known & ~equal).any(1).long(), 0)
    return {"route_agree": (int((equal & known).sum()), int(known.sum()))}, flipped


def _signed(ids: Tensor) -> Tensor:
    """Expert ids with −1 for not known, also of unsigned types, whose largest value says so."""
    if ids.dtype not in (torch.uint8, torch.uint16):
        return ids
    wide = ids.to(torch.int32)
    return torch.where(wide == torch.iinfo(ids.dtype).max, -1, wide)


def _place_cells(absolute: Tensor, places: Tensor | None, flipped: Tensor | None) -> dict[str, dict[Any, Cell]]:
    cells: dict[str, dict[Any, Cell]] = {}
    if len(absolute) == 0:
        return cells
    if places is not None:  # 0, 1, 2-3, 4-7, …: the exponent of frexp is the number of bits, exactly
        bits = torch.frexp(places.double()).exponent.long()
        cells["position"] = _cells(bits, list(range(int(bits.max()) + 1)), absolute)
    if flipped is not None:
        cells["routes"] = _cells(flipped, [0, 1, 2], absolute)
    return cells


def _cells(codes: Tensor, keys: Seq[Any], absolute: Tensor) -> dict[Any, Cell]:
    """Cells of \\|d\\| [M] by code [M]; empty ones are left out."""
    zeros = torch.zeros(len(keys), dtype=torch.float64, device=absolute.device)
    counts = torch.bincount(codes, minlength=len(keys)).tolist()
    sums = zeros.index_add(0, codes, absolute).tolist()
    most = zeros.scatter_reduce(0, codes, absolute, "amax").tolist()
    return {key: (n, total, top) for key, n, total, top in zip(keys, counts, sums, most, strict=True) if n}


def _worst(
    train: Tensor, rollout: Tensor, broken: Tensor, used: Tensor, layout: Layout, sequence: Owners | None
) -> tuple[TokenPair, ...]:
    lost = torch.nonzero(broken).flatten()[:NUM_WORST].tolist()
    far = torch.topk((train - rollout)[used].abs(), min(NUM_WORST, len(used))).indices
    tokens = []
    for index in lost + used[far].tolist():
        label = sequence.names[int(sequence.codes[index])] if sequence is not None and sequence.named else None
        row, column = layout.place(index)
        tokens.append(TokenPair(row, column, float(train[index]), float(rollout[index]), label))
    return worst_first(tokens)
