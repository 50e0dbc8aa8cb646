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
Staleness is no link: tokens of other versions are set apart before (``Agreement.num_stale``). A deployment that trains
on them, because several optimizer steps share a batch, compares version with version: that pair is told, not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.agreement import Agreement
from lockstep.config.schema import RunConfig
from lockstep.interfaces import LogProbs
from lockstep.parity.measure import measure_scores
from lockstep.parity.replay import Bench

Node = Literal["sampled", "decode", "prefill", "loaded", "single", "trained", "updated"]

NODES: dict[Node, str] = {
    "sampled": "what the engine reported when it sampled",
    "decode": "the engine, token by token over its cache",
    "prefill": "the engine, in one prefill",
    "loaded": "an engine freshly loaded with the trainer's weights, in one prefill",
    "single": "the trainer, one sequence at a time",
    "trained": "the trainer, packed as it trains",
    "updated": "the trainer after an optimizer step on that batch",
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """What decides which pairs are needed. ``refits``: the engine's weights arrive by a refit, not by a load;
    ``packs``: the trainer packs or pads sequences; ``mixes_versions``: it trains on tokens of older versions;
    ``sampled_elsewhere``: by another engine than the embedded one, which is the one that scores again."""

    refits: bool = True
    packs: bool = True
    mixes_versions: bool = False
    sampled_elsewhere: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Deployment:
        """Of a run as configured: its engine is refitted after each batch; when several optimizer steps share one, all
        but the first train on tokens of an older version."""
        mixes = config.algorithm.optimizer_steps_per_batch > 1
        return cls(
            refits=True,
            packs=config.trainer.packing != "single",
            mixes_versions=mixes,
            sampled_elsewhere=config.rollout.engine != "torch",
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two nodes that differ in one thing: what it isolates, and why this deployment needs it. ``judged`` False: the
    difference is meant to be there, and no bound is held against it."""

    first: Node
    second: Node
    isolates: str
    reason: str
    judged: bool = True

    @property
    def name(self) -> str:
        """``decode/prefill`` and the like."""
        return f"{self.first}/{self.second}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One pair's agreement, and whether every metric with a bound is at or below it (None: nothing was measured, or
    the pair is not judged).

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
    isolates, reason = "scheduling, sampler, cached prefixes", "sampling ran in batches with other requests"
    if deployment.sampled_elsewhere:
        isolates = f"kernels of the engine that sampled, {isolates}"
        reason = "another engine sampled than the embedded one, which scores again"
    nodes: list[tuple[Node, str, str]] = [
        ("decode", isolates, reason),
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
        pairs.append(Pair("trained", "updated", "staleness", "tokens of an older version are trained on", judged=False))
    return tuple(pairs)


ENDS = Pair("sampled", "trained", "all of it", "what the gate judges")
"""The two ends of the chain."""


Updated = Callable[[], Mapping[str, LogProbs]]
"""The trainer's log-probs of the recorded tokens after an optimizer step on them."""


def measure_pairs(
    bench: Bench, pairs: Seq[Pair], bounds: Mapping[str, float], updated: Updated | None = None
) -> list[Measured]:
    """Score the recorded tokens at every node once and compare the pairs, the ends of the chain last. ``bounds`` by
    metric; a pair holds if it is within all of them. ``updated`` is called last, since it may move the bench's weights.

    Raises ValueError for a pair with ``updated`` where that is not given.
    """
    scored: dict[Node, dict[str, LogProbs]] = {}
    for pair in pairs:
        for node in (pair.first, pair.second):
            if node not in scored and node != "updated":
                scored[node] = _score(bench, node)
    if any("updated" in (pair.first, pair.second) for pair in pairs):
        if updated is None:
            raise ValueError(f"{NODES['updated']} needs its weights, and this bench has those of one version")
        scored["updated"] = {key: LogProbs(one.logprobs, bench.version) for key, one in updated().items()}
    results = []
    for pair in [*pairs, ENDS]:
        agreement = measure_scores(scored[pair.second], scored[pair.first], bench.fresh, bench.rollout_ids)
        found = {metric: agreement.metrics.get(metric) for metric in bounds}
        above = [metric for metric, value in found.items() if value is None or not value <= bounds[metric]]
        shown = next(iter(above), next(iter(bounds)))
        unjudged = agreement.unjudged or not pair.judged
        holds = None if unjudged else not above and not agreement.num_nonfinite
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
    raise ValueError(f"{NODES[node]} is not scored by a bench")
