"""Routing replay (R3): the trainer runs the experts that the engine chose, and weighs them by its own logits.

A router picks K of E experts by the order of its scores. Where two scores nearly tie, a difference in rounding is
enough for trainer and engine to pick differently, and the token then goes through other weights: a jump, where all
other rounding is smooth. Replay removes the choice and nothing else ("Stabilizing MoE Reinforcement Learning by
Aligning Training and Inference Routers", arXiv 2510.11370)::

    engine's ids of a sequence [T-1, L, K] ──pack──▶ ids of a micro-batch [n, L, K] ──hook on each router──▶
        scores = rule(live logits at these ids), renormalised as the architecture does: gradients reach the gate

Positions without ids (served from a cache that kept none) and positions whose ids are the router's own set are left
exactly as the router decided, order included; with equal routes replay therefore changes no bit. Every router class
has a rule here that is checked against the router itself when the replay is built; a class without one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.model.adapter import num_experts, routers
from lockstep.model.load import ModelError
from lockstep.records import Sequence, route_dtype, signed_routes
from lockstep.train.packing import MicroBatch

Rule = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""(router, logits [n, E], expert ids [n, K]) → scores [n, K], as the router's own forward computes them."""


class RoutingReplayError(ValueError):
    """Expert ids that can't be replayed: of which sequence, what was wrong, what would be right."""


def _softmax(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    scores = F.softmax(logits, dtype=torch.float, dim=-1).gather(1, ids)
    if router.norm_topk_prob:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return scores.to(logits.dtype)


def _sigmoid(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    scores = logits.sigmoid().gather(1, ids)
    if router.norm_topk_prob:
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    return scores * router.routed_scaling_factor


def _scoring_function(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    scores = router.score_fn(logits).gather(1, ids)
    scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    return scores * router.routed_scaling_factor


RULES: dict[str, Rule] = {
    "Qwen3MoeTopKRouter": _softmax,
    "DeepseekV3TopkRouter": _sigmoid,
    "DeepseekV32TopkRouter": _sigmoid,
    "GlmMoeDsaTopkRouter": _sigmoid,
    "DeepseekV4TopKRouter": _scoring_function,
    "DeepseekV4HashRouter": _scoring_function,
}
"""Router classes of transformers 5 and how each turns logits and ids into scores. Biases that only steer the choice
(``e_score_correction_bias``) have no part in the scores, and so none in a replay."""


class RoutingReplay:
    """Replays expert ids in ``model``'s routers. Raises ModelError if it has none, or one without a proved rule."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.routers: list[Any] = routers(model)
        if not self.routers:
            raise ModelError(f"trainer.routing_replay: {type(model).__name__} has no experts; set it to false")
        self.num_experts = num_experts(model)
        self.dtype = route_dtype(self.num_experts)
        self.num_chosen = int(self.routers[0].top_k)
        proved: set[type] = set()
        for router in self.routers:
            if type(router) not in proved:
                _prove(router)
                proved.add(type(router))

    def check(self, sequence: Sequence) -> np.ndarray:
        """The sequence's expert ids [T-1, L, K] int32, -1 where missing. Raises RoutingReplayError if they are not of
        this model and these tokens."""
        routes, name = sequence.routes, f"sequence {sequence.sequence_id}"
        if routes is None:
            raise RoutingReplayError(f"{name} carries no expert ids to replay: set rollout.record_routes = true")
        expected = (len(sequence.tokens) - 1, len(self.routers), self.num_chosen)
        if routes.shape != expected:
            raise RoutingReplayError(
                f"{name}: expert ids have shape {list(routes.shape)}, this model needs {list(expected)} "
                "[tokens - 1, MoE layers, experts per token]"
            )
        if routes.dtype != self.dtype:
            raise RoutingReplayError(
                f"{name}: expert ids are {routes.dtype}, but {self.num_experts} experts travel as {self.dtype}"
            )
        ids = signed_routes(routes)
        _refuse(name, ids, ids >= self.num_experts, f"is no expert of {self.num_experts}")
        missing = ids < 0
        _refuse(name, ids, missing & ~missing.all(-1, keepdims=True), "is missing beside known ones")
        self._check_choices(name, sequence.tokens, ids)
        return ids

    def _check_choices(self, name: str, tokens: np.ndarray, ids: np.ndarray) -> None:
        """No expert twice for a token, and in layers that look experts up by token id, those of the table."""
        ordered = np.sort(ids, axis=-1)
        for layer, router in enumerate(self.routers):
            chosen, known = ordered[:, layer], ordered[:, layer, 0] >= 0
            if hasattr(router, "tid2eid"):
                table = router.tid2eid[torch.from_numpy(tokens[:-1].astype(np.int64)).to(router.tid2eid.device)]
                expected = np.sort(table.cpu().numpy(), axis=-1)
                wrong = np.flatnonzero(known & (chosen != expected).any(-1))
                if len(wrong):
                    at = int(wrong[0])
                    raise RoutingReplayError(
                        f"{name}, position {at} (token id {tokens[at]}), MoE layer {layer}: the engine ran experts "
                        f"{chosen[at].tolist()}, the trainer's hash table has {expected[at].tolist()}: the tables "
                        "differ, which no replay can mend"
                    )
            else:
                twice = np.flatnonzero(known & (chosen[:, 1:] == chosen[:, :-1]).any(-1))
                if len(twice):
                    at = int(twice[0])
                    raise RoutingReplayError(
                        f"{name}, position {at}, MoE layer {layer}: experts {ids[at, layer].tolist()} name one twice"
                    )

    def pack(self, batch: MicroBatch, sequences: Seq[Sequence], checked: Mapping[int, np.ndarray]) -> np.ndarray:
        """Ids [R · n, L, K] int64 by flat position of ``batch``, -1 at padding and where missing.

        ``checked`` holds ``check``'s result by index into ``sequences``. A position that several sequences share (their
        prompt) has the ids of the first that knows them. Raises RoutingReplayError if another knows different ones.
        """
        packed = np.full((batch.input_ids.size, len(self.routers), self.num_chosen), -1, dtype=np.int64)
        owner = np.full(batch.input_ids.size, -1)
        for index in batch.members:
            places = batch.inputs[index]
            ids = checked[index][: len(places)]
            before = packed[places]
            both = (before >= 0) & (ids >= 0)
            differs = (np.sort(before, -1) != np.sort(ids, -1)) & both
            if differs.any():
                at, layer = (int(part[0]) for part in np.nonzero(differs.any(-1)))
                first, second = sequences[int(owner[places[at]])], sequences[index]
                raise RoutingReplayError(
                    f"sequences {first.sequence_id} and {second.sequence_id} share position {at} of their prompt, but "
                    f"in MoE layer {layer} their experts are "
                    f"{before[at, layer].tolist()} and {ids[at, layer].tolist()}"
                )
            owner[places[owner[places] < 0]] = index
            packed[places] = np.where(before >= 0, before, ids)
        return packed

    @contextmanager
    def replayed(self, ids: torch.Tensor) -> Iterator[None]:
        """While the block runs, forwards over n positions use the expert ids [n, L, K] int64 where they are not -1.

        To be held over a forward *and* its backward, which may run layers again (gradient checkpointing).
        """
        handles = [
            router.register_forward_hook(_hook(RULES[type(router).__name__], ids[:, layer]))
            for layer, router in enumerate(self.routers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _hook(rule: Rule, ids: torch.Tensor) -> Callable[[Any, Any, Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    def replay(router: Any, _inputs: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, _, own = output
        if own.shape != ids.shape:
            raise RoutingReplayError(
                f"a forward over {len(own)} positions was given expert ids of {len(ids)}: the router saw other tokens"
            )
        # The same set in another order would only change the order of a sum; keep the router's.
        same = (ids.sort(-1).values == own.sort(-1).values).all(-1)
        keep = same | (ids < 0).any(-1)
        chosen = torch.where(keep[:, None], own, ids)
        return logits, rule(router, logits, chosen), chosen

    return replay


def can_replay(model: torch.nn.Module) -> bool:
    """Whether the experts of ``model``, if it has any, can be replayed."""
    try:
        RoutingReplay(model)
    except ModelError:
        return False
    return True


@torch.no_grad()
def _prove(router: Any) -> None:
    """Hold the class' rule to the router's own scores on random states."""
    name = type(router).__name__
    rule = RULES.get(name)
    if rule is None:
        raise ModelError(
            f"trainer.routing_replay: no rule for the scores of {name}; known: {', '.join(sorted(RULES))}; "
            "set trainer.routing_replay = false"
        )
    weight = router.weight
    states = torch.randn(1, 8, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    arguments = (torch.arange(8, device=weight.device)[None],) if hasattr(router, "tid2eid") else ()
    logits, scores, ids = router(states, *arguments)
    found = rule(router, logits, ids)
    if found.dtype != scores.dtype or not torch.equal(found, scores):
        raise ModelError(
            f"trainer.routing_replay: the rule for {name} gives scores up to {(found - scores).abs().max():.1e} away "
            "from the router's own: this release of transformers computes them differently"
        )


def _refuse(name: str, ids: np.ndarray, wrong: np.ndarray, why: str) -> None:
    """Raise for the first id [position, layer, choice] that is ``wrong``."""
    if wrong.any():
        at, layer, choice = (int(part[0]) for part in np.nonzero(wrong))
        raise RoutingReplayError(f"{name}, position {at}, MoE layer {layer}: expert id {ids[at, layer, choice]} {why}")
