"""Which comparisons a deployment needs so that a disagreement has one place to come from, and why they suffice.

The log-prob that was sampled and the one that is trained are the two ends of a chain, and each link changes one thing::

    sampled ─ decode ─ prefill ─ loaded ─ single ─ trained
            │        │         │        │        └ packing
            │        │         │        └ kernels, dtype, model code
            │        │         └ refit
            │        └ cache and decode kernels
            └ scheduling, sampler, cached prefixes

The differences along the chain add up, token by token, to the difference of its ends; so mean|d| of the ends is at most
the sum of the links' mean|d|. If every link is near zero the ends agree, and if the ends disagree, a link shows it.
Staleness is no link: tokens of other versions are set apart before (``Agreement.num_stale``), and only a deployment
that trains on them compares version with version.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.agreement import Agreement
from lockstep.config.schema import RunConfig
from lockstep.interfaces import LogProbs
from lockstep.parity.measure import measure_scores
from lockstep.parity.replay import Bench

Node = Literal["sampled", "decode", "prefill", "loaded", "single", "trained", "older"]

NODES: dict[Node, str] = {
    "sampled": "what the engine reported when it sampled",
    "decode": "the engine, token by token over its cache",
    "prefill": "the engine, in one prefill",
    "loaded": "an engine freshly loaded with the trainer's weights, in one prefill",
    "single": "the trainer, one sequence at a time",
    "trained": "the trainer, packed as it trains",
    "older": "the trainer at the version that sampled",
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """What decides which pairs are needed. ``refits``: the engine's weights arrive by a refit, not by a load;
    ``packs``: the trainer packs or pads sequences; ``mixes_versions``: it trains on tokens of older versions."""

    refits: bool = True
    packs: bool = True
    mixes_versions: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Deployment:
        """Of a run as configured: one process, its engine refitted after each step, nothing stale."""
        return cls(refits=True, packs=config.trainer.packing != "single")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two nodes that differ in one thing: what it isolates, and why this deployment needs it."""

    first: Node
    second: Node
    isolates: str
    reason: str

    @property
    def name(self) -> str:
        """``decode/prefill`` and the like."""
        return f"{self.first}/{self.second}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One pair's agreement, and whether every metric with a bound is at or below it (None: nothing was measured).

    ``metric``, ``value`` and ``bound`` are those of the first one that is not, else of the first one.
    """

    pair: Pair
    agreement: Agreement
    value: float | None
    bound: float
    holds: bool | None
    metric: str


def plan(deployment: Deployment) -> tuple[Pair, ...]:
    """The links of the chain for this deployment, the engine's end first; the chain is closed, so they suffice."""
    nodes: list[tuple[Node, str, str]] = [
        ("decode", "scheduling, sampler, cached prefixes", "sampling ran in batches with other requests"),
        ("prefill", "cache and decode kernels", "sampling decoded over a cache"),
    ]
    if deployment.refits:
        nodes.append(("loaded", "refit", "the engine's weights came by a refit"))
    nodes.append(
        ("single" if deployment.packs else "trained", "kernels, dtype, model code", "two programs compute the model")
    )
    if deployment.packs:
        nodes.append(("trained", "packing", "the trainer lays several sequences in a micro-batch"))
    pairs: list[Pair] = []
    before: Node = "sampled"
    for node, isolates, reason in nodes:
        pairs.append(Pair(before, node, isolates, reason))
        before = node
    if deployment.mixes_versions:
        pairs.append(Pair("older", "trained", "staleness", "tokens of older versions are trained on"))
    return tuple(pairs)


ENDS = Pair("sampled", "trained", "all of it", "what the gate judges")
"""The two ends of the chain."""


def measure_pairs(bench: Bench, pairs: Seq[Pair], bounds: Mapping[str, float]) -> list[Measured]:
    """Score the recorded tokens at every node once and compare the pairs, the ends of the chain last. ``bounds`` by
    metric; a pair holds if it is within all of them.

    Raises ValueError for a pair with ``older``, which a bench of one version can't score.
    """
    scored: dict[Node, dict[str, LogProbs]] = {}
    for pair in pairs:
        for node in (pair.first, pair.second):
            if node not in scored:
                scored[node] = _score(bench, node)
    fresh = [
        replace(s, loss_mask=s.loss_mask & (s.versions == bench.version) & (s.kv_versions == bench.version))
        for s in bench.sequences
    ]
    results = []
    for pair in [*pairs, ENDS]:
        agreement = measure_scores(scored[pair.second], scored[pair.first], fresh)
        found = {metric: agreement.metrics.get(metric) for metric in bounds}
        above = [metric for metric, value in found.items() if value is None or not value <= bounds[metric]]
        shown = next(iter(above), next(iter(bounds)))
        holds = None if agreement.unjudged else not above and not agreement.num_nonfinite
        results.append(Measured(pair, agreement, found[shown], bounds[shown], holds, shown))
    return results


def _score(bench: Bench, node: Node) -> dict[str, LogProbs]:
    setting = bench.setting
    if node == "sampled":
        return {s.sequence_id: LogProbs(s.logprobs, bench.version) for s in bench.sequences}
    if node == "trained":
        return bench.trainer_scores(setting)
    if node == "single":
        return bench.trainer_scores(replace(setting, trainer=setting.trainer.model_copy(update={"packing": "single"})))
    if node == "decode":
        return bench.engine_scores(replace(setting, path="decode"))[0]
    if node == "prefill":
        return bench.engine_scores(replace(setting, path="prefill"))[0]
    if node == "loaded":
        return bench.engine_scores(replace(setting, path="prefill", reload=("",)))[0]
    raise ValueError(f"{NODES[node]} needs the weights of that version: build a bench with it and compare the two")
