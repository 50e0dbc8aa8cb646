"""What the tests of the receiver and of the registry share: weights of a seed, refits, and what a fresh engine says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from lockstep.interfaces import WeightSource
from lockstep.model.adapter import num_experts, routers
from lockstep.model.weights import ModelWeights
from lockstep.records import Manifest, Sequence, TensorSpec
from lockstep.refit.behaves import Behaviour
from lockstep.refit.check import module_scores
from lockstep.refit.names import as_checkpoint
from lockstep.refit.probes import make_probes
from lockstep.refit.transaction import Receipt, run_refit
from lockstep.refit.transports import LocalTransport
from tests.vllm.models import CONFIGS, greedy_tokens, start_engine, tiny_model

NUM_GREEDY = 256
BOUND = 1e-5
CONFIGS["gpt_oss"] = {
    **{key: value for key, value in CONFIGS["qwen3"].items() if key != "intermediate_size"},
    "intermediate_size": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}
_KEPT: list[Any] = []


def weights(family: str, seed: int, version: int = 1) -> WeightSource:
    """A tiny model's weights under checkpoint names."""
    return as_checkpoint(ModelWeights(tiny_model(family, seed=seed), version))


def refit(engine: Any, source: WeightSource, *, verify: bool = True, behaves: Behaviour | None = None) -> Receipt:
    """One refit by the local transport."""
    return run_refit(source, engine.receiver(), LocalTransport(), verify=verify, behaves=behaves)


def behaviour(engine: Any, family: str, seed: int) -> Behaviour:
    """The check of the claim ``behaves`` against transformers' forward of the weights of ``seed``; it has scored the
    engine as it is now."""
    model = tiny_model(family, seed=seed)
    probes = make_probes(
        lambda sequences: module_scores(model, sequences),
        vocab_size=99,
        num_experts=num_experts(model) if routers(model) else 0,
        context=64,
    )
    check = Behaviour(probes, engine.score, lambda sequences: module_scores(model, sequences), bound=BOUND)
    check.before()
    return check


def assert_behaves(receipt: Receipt) -> None:
    """Every claim of a verified refit held, with power."""
    statuses = {claim.name: claim.status for claim in receipt.claims}
    assert statuses.pop("transported") == "not checked", "one process"
    assert set(statuses.values()) == {"held"}, receipt.claims


@dataclass(frozen=True)
class Answers:
    """What an engine does: greedy tokens, and log-probs of fixed sequences by both paths."""

    greedy: list[list[int]]
    prefill: np.ndarray
    decode: np.ndarray

    def same_tokens(self, other: Answers) -> int:
        """Greedy tokens that are equal, of 256."""
        both = zip(self.greedy, other.greedy, strict=True)
        return sum(one == two for left, right in both for one, two in zip(left, right, strict=True))

    def difference(self, other: Answers, path: str) -> float:
        """Largest difference of log-probs."""
        return float(np.abs(getattr(self, path) - getattr(other, path)).max())


def answers(engine: Any) -> Answers:
    """Ask an engine."""
    scored = {path: engine.score(list(probes()), path) for path in ("prefill", "decode")}
    flat = {path: np.concatenate([one[s.sequence_id].logprobs[1:] for s in probes()]) for path, one in scored.items()}
    return Answers(greedy_tokens(engine), flat["prefill"], flat["decode"])


@cache
def loaded_from_disk(family: str, seed: int) -> Answers:
    """What a fresh engine answers that loads the weights of ``seed`` from disk.

    It stays open: the end of one engine takes vLLM's process groups from all others in the process.
    """
    engine = start_engine(tiny_model(family, seed=seed), weights=True)
    _KEPT.append(engine)
    return answers(engine)


def close_references() -> None:
    """End the engines that ``loaded_from_disk`` started; what they said is remembered."""
    while _KEPT:
        _KEPT.pop().close()


def assert_like_a_fresh_engine(engine: Any, family: str, seed: int) -> None:
    """256 of 256 greedy tokens, and log-probs by both paths."""
    mine, reference = answers(engine), loaded_from_disk(family, seed)
    assert mine.same_tokens(reference) == NUM_GREEDY
    assert mine.difference(reference, "prefill") <= BOUND
    assert mine.difference(reference, "decode") <= BOUND


@cache
def probes() -> tuple[Sequence, ...]:
    generator = np.random.default_rng(0)
    made = []
    for index, length in enumerate((24, 17)):
        tokens = generator.integers(3, 60, length).astype(np.int32)
        zeros = np.zeros(length, np.int32)
        made.append(Sequence(f"p{index}", tokens, np.arange(length) > 0, np.zeros(length, np.float32), zeros, zeros))
    return tuple(made)


class Altered:
    """A source with some tensors dropped, renamed, added or made otherwise."""

    def __init__(self, source: WeightSource, change: Any) -> None:
        self._manifest = source.manifest()
        self._tensors = {name: tensor for name, _, _, tensor in source.shards()}
        change(self._tensors)
        known = {spec.name: spec for spec in self._manifest.tensors}
        self._specs = tuple(
            replace(
                known.get(name, TensorSpec(name, (), "float32", name)),
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
            )
            for name, tensor in self._tensors.items()
        )

    def manifest(self) -> Manifest:
        """The manifest of what is there now."""
        return replace(self._manifest, tensors=self._specs)

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """Whole tensors."""
        for name, tensor in self._tensors.items():
            yield name, tuple(tensor.shape), (0,) * tensor.ndim, tensor
